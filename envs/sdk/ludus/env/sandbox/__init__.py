"""What keeps a worker process to itself: a module for each layer, `confine.py` for their order."""
