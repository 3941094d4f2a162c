"""Rollout functions that play several groups in one call, as TRL's do."""
