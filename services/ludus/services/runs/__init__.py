"""Runs on a cluster: from a run configuration to a RayJob, what becomes of it, and its results."""
