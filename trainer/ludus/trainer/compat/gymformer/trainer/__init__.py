"""Training of agents and of reward models."""

from ludus.trainer.compat.gymformer.trainer.reward import train_reward

__all__ = ["train_reward"]
