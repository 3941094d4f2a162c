"""Prefixes of targets, and the catalogue of environments that installed packages contain."""
