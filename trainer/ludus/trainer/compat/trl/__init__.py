"""TRL's calls: an import line changed, a script of TRL's trains here."""

from ludus.trainer.compat.trl.completions import generate_rollout_completions

__all__ = ["generate_rollout_completions"]
