"""The calls of other projects, over what is here: one import line is the migration."""
