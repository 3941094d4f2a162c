"""Runs on a cluster: the RayJob of a run configuration, its state, and its results."""
