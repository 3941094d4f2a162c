"""Data that Forge's parts exchange."""
