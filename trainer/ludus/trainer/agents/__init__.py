"""Agents that speak OpenAI's API: the endpoint, what is said through it, and who plays with it."""
