"""Recordings of played episodes: written, read, and verified by a replay."""
