"""What trains: agents in environments, and reward models of preferences."""

from ludus.trainer.compat.gymformer.trainer.reward import train_reward

__all__ = ["train_reward"]
