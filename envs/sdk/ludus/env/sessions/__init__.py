"""Sessions of one server: the interface under every wire, and its implementation."""
