"""What renderers share: reading which move a language model means."""
