"""Environments that were written for OpenEnv, as ours."""
