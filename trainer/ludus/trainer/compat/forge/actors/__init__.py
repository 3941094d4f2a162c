"""Forge's parts by name, in this process: for loops of one's own."""
