"""The sandbox of worker processes: a module for each layer, combined by `confine.py`."""
