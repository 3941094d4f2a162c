"""Rollout functions with the signatures of TRL, which play several groups in one call."""
