"""Strings that name environments, and what they build."""
