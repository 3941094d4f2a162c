"""The client's wires behind one interface."""
