"""How learning rate and coefficients move over a run."""

from __future__ import annotations

import math

from ludus.proto.config import LearnerConfig, RunConfig
from ludus.trainer.types import Coefficients


def coefficients(run: RunConfig, step: int) -> Coefficients:
    """What the optimizer and the loss use in training step `step`, from 0."""
    algorithm, last = run.algorithm, max(1, run.training.num_steps - 1)
    annealed = min(1.0, step / last / algorithm.anneal_fraction)
    return Coefficients(
        learning_rate=_learning_rate(run.learner, step, last),
        entropy=_between(algorithm.entropy_coef, algorithm.entropy_coef_final, annealed),
        kl=_between(algorithm.kl_coef, algorithm.kl_coef_final, annealed),
    )


def _learning_rate(config: LearnerConfig, step: int, last: int) -> float:
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    span = max(1, last - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    if config.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return _between(config.learning_rate, config.learning_rate_final, progress)


def _between(first: float, final: float | None, progress: float) -> float:
    """Linear from `first` to `final`; `first` throughout when there is no final value."""
    return first if final is None else first + progress * (final - first)
