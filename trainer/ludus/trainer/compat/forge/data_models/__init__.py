"""Data that Forge's actors exchange."""
