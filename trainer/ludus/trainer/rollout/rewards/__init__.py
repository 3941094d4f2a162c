"""Rewards of played episodes: environment returns, functions and reward models."""
