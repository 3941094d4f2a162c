"""Sessions in worker processes: what one does to its process, no other feels."""
