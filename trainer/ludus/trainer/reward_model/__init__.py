"""Reward models: training from preferences, loading and scoring."""

from ludus.trainer.reward_model.model import RewardModel, load_reward_model
from ludus.trainer.reward_model.training import train_reward_model

__all__ = ["RewardModel", "load_reward_model", "train_reward_model"]
