"""Preparations of a run: environments, the first model, and the canary prompts."""
