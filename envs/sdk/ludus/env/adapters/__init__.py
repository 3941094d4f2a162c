"""Adapters for the environments of Gymnasium and OpenEnv."""

GYMNASIUM = "gymnasium"
OPENENV = "openenv"
