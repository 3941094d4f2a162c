"""Limits and sampling settings of an environment's episodes."""

from __future__ import annotations

from ludus.proto.config import LanguageModelRun, RolloutConfig
from ludus.trainer.core.types import Sampling


def episode_limits(run: LanguageModelRun, environment: str) -> RolloutConfig:
    """Return the run's rollout settings with the limits that `environment` replaces."""
    config = run.environments[environment]
    limits = {
        "max_turns": config.max_turns,
        "max_tokens": config.max_tokens,
        "max_completion_tokens": config.max_completion_tokens,
    }
    return run.rollout.model_copy(
        update={name: limit for name, limit in limits.items() if limit is not None}
    )


def sampling_settings(limits: RolloutConfig, temperature: float | None = None) -> Sampling:
    """Return the settings for one completion; None keeps the temperature of the rollouts."""
    return Sampling(
        temperature=limits.temperature if temperature is None else temperature,
        max_tokens=limits.max_completion_tokens,
        top_p=limits.top_p,
        top_k=limits.top_k,
        min_p=limits.min_p,
        repetition_penalty=limits.repetition_penalty,
    )
