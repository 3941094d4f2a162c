"""PPO's settings and agents, and the networks that they train."""
