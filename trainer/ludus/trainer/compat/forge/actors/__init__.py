"""Forge's parts for custom loops in this process."""
