"""A run on disk: its folder, metrics, checkpoints and summary."""
