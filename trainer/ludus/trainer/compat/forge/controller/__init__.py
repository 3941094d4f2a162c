"""Actors and services with Forge's calling conventions."""
