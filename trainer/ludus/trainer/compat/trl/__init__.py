"""TRL's API, implemented by Ludus. A TRL script migrates by changing its imports."""

from ludus.trainer.compat.trl.callbacks import RichProgressCallback
from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.compat.trl.rollout.arguments import generate_rollout_completions
from ludus.trainer.compat.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "RichProgressCallback", "generate_rollout_completions"]
