"""The length of a run, and the schedules of its checkpoints, learning rate and coefficients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from ludus.proto.config import LanguageModelRun, LearnerConfig
from ludus.proto.errors import ConfigError
from ludus.trainer.core.types import Coefficients
from ludus.trainer.run.entropy_control import EntropyState

_NUM_DIGITS = 9
"""Decimal digits to which numbers of groups are rounded, so that 0.1 of 30 tasks is 3, not 4."""
_MAX_CHECKPOINT_SHARE = 0.05
"""Maximum share of the time that checkpoints by time take."""


class CheckpointSchedule:
    """Decides after which steps a run writes a checkpoint.

    A checkpoint is due by time if the next step would end after the interval. A run with long steps
    therefore writes one after each step.

    Args:
        every_steps: number of steps between checkpoints. None: only by time.
        every_s: minimum interval of checkpoints by time. None: only by steps.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        every_steps: int | None,
        every_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_steps = every_steps
        self._clock = clock
        self._interval_s = self._every_s = math.inf if every_s is None else every_s
        self._step_end_s = self._checkpoint_end_s = self._clock()
        self._step_s = 0.0

    def end_step(self) -> None:
        """Record the end of a step; call it once per step."""
        now_s = self._clock()
        self._step_s, self._step_end_s = now_s - self._step_end_s, now_s

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint must follow this step."""
        if self._every_steps is not None and step % self._every_steps == 0:
            return True
        return self._step_end_s + self._step_s - self._checkpoint_end_s > self._interval_s

    def end_checkpoint(self, duration_s: float) -> None:
        """Record that a checkpoint was written, in `duration_s`."""
        self._interval_s = max(self._every_s, duration_s / _MAX_CHECKPOINT_SHARE)
        self._step_end_s = self._checkpoint_end_s = self._clock()


def resolve_num_steps(run: LanguageModelRun, num_tasks: Mapping[str, int]) -> LanguageModelRun:
    """Return the run with training.num_steps computed from training.num_epochs, if that is set.

    `num_tasks` has the number of tasks by environment, if the environment reports it.
    """
    training, num_epochs = run.training, run.training.num_epochs
    if num_epochs is None:
        return run
    (name,) = run.environments
    if name not in num_tasks:
        raise ConfigError(
            f"training.num_epochs = {num_epochs:g} counts passes over the tasks of an environment, "
            f"but every seed of '{name}' is another task; set training.num_steps instead"
        )
    tasks_per_group = 1 if run.rollout.group_seed == "shared" else run.rollout.group_size
    num_groups = round(num_epochs * num_tasks[name] / tasks_per_group, _NUM_DIGITS)
    num_steps = max(1, math.ceil(round(num_groups / training.groups_per_step, _NUM_DIGITS)))
    return run.model_copy(update={"training": training.model_copy(update={"num_steps": num_steps})})


def compute_coefficients(
    run: LanguageModelRun, step: int, entropy_state: EntropyState | None = None
) -> Coefficients:
    """Return the coefficients of the optimizer and the loss in training step `step`, from 0.

    Args:
        entropy_state: the state after the steps before; None before the first.
    """
    algorithm, last_step = run.algorithm, max(1, run.training.num_steps - 1)
    progress = min(1.0, step / last_step / algorithm.anneal_fraction)
    entropy_coef = _interpolate(algorithm.entropy_coef, algorithm.entropy_coef_final, progress)
    if algorithm.entropy_control is not None:
        state = entropy_state or EntropyState(coef=entropy_coef)
        entropy_coef = state.choose_coef(algorithm.entropy_control)
    return Coefficients(
        learning_rate=_compute_learning_rate(run.learner, run.learning_rate, step, last_step),
        entropy=entropy_coef,
        kl=_interpolate(algorithm.kl_coef, algorithm.kl_coef_final, progress),
    )


def _compute_learning_rate(
    config: LearnerConfig, peak_rate: float, step: int, last_step: int
) -> float:
    if step < config.warmup_steps:
        return peak_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak_rate
    num_decay_steps = max(1, last_step - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / num_decay_steps)
    if config.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return _interpolate(peak_rate, config.learning_rate_final, progress)


def _interpolate(start: float, end: float | None, progress: float) -> float:
    """Interpolate linearly from `start` to `end`; return `start` if there is no end value."""
    return start if end is None else start + progress * (end - start)
