"""Sessions of one server: the interface that every wire is written against, and its core."""
