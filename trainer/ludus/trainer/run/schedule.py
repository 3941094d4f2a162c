"""How long a run is, and how learning rate and coefficients move over it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ludus.proto.config import LanguageModelRun, LearnerConfig
from ludus.proto.errors import ConfigError
from ludus.trainer.core.types import Coefficients

_DIGITS = 9
"""To which passes over a data set are told apart: 0.1 of 30 tasks are 3, and not 4."""


def in_steps(run: LanguageModelRun, num_tasks: Mapping[str, int]) -> LanguageModelRun:
    """The run, with training.num_steps from training.num_epochs where that is set.

    Args:
        num_tasks: of the environments that say how many they have, by name.

    Raises:
        ConfigError: the run counts passes, and its environment does not say over how many tasks.
    """
    training, epochs = run.training, run.training.num_epochs
    if epochs is None:
        return run
    (name,) = run.environments
    if name not in num_tasks:
        raise ConfigError(
            f"training.num_epochs = {epochs:g} counts passes over the tasks of an environment, but "
            f"every seed of '{name}' is another task; set training.num_steps instead"
        )
    per_group = 1 if run.rollout.group_seed == "shared" else run.rollout.group_size
    groups = round(epochs * num_tasks[name] / per_group, _DIGITS)
    num_steps = max(1, math.ceil(round(groups / training.groups_per_step, _DIGITS)))
    lasting = training.model_copy(update={"num_steps": num_steps})
    return run.model_copy(update={"training": lasting})


def coefficients(run: LanguageModelRun, step: int) -> Coefficients:
    """What the optimizer and the loss use in training step `step`, from 0."""
    algorithm, last = run.algorithm, max(1, run.training.num_steps - 1)
    annealed = min(1.0, step / last / algorithm.anneal_fraction)
    return Coefficients(
        learning_rate=_learning_rate(run.learner, run.learning_rate, step, last),
        entropy=_between(algorithm.entropy_coef, algorithm.entropy_coef_final, annealed),
        kl=_between(algorithm.kl_coef, algorithm.kl_coef_final, annealed),
    )


def _learning_rate(config: LearnerConfig, peak: float, step: int, last: int) -> float:
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    span = max(1, last - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    if config.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return _between(peak, config.learning_rate_final, progress)


def _between(first: float, final: float | None, progress: float) -> float:
    """Linear from `first` to `final`; `first` throughout when there is no final value."""
    return first if final is None else first + progress * (final - first)
