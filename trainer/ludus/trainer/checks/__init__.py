"""Checks before a start, shared by `ludus train`, its `--dry-run` and `Trainer`."""
