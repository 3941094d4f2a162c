"""Environments, tiny models and canary prompts, made ready before a run starts."""
