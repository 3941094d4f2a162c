"""Command line and cluster services."""
