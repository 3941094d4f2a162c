"""Adapter for environments that were written for OpenEnv."""
