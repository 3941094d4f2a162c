"""Definitions that processes share: wire, configuration, errors, metric names and run files."""
