"""TRL's calls: an import line changed, a script of TRL's trains here."""

from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.compat.trl.rollout.arguments import generate_rollout_completions
from ludus.trainer.compat.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "generate_rollout_completions"]
