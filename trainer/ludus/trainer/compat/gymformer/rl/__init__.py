"""Settings, agents and networks of PPO."""
