"""Targets: the strings that name environments, and their factories."""
