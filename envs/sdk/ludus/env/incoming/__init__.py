"""Limits on what callers send: the values in JSON, and the faults that replies list."""
