"""Forge's actors for custom loops in this process."""
