"""The learning rate of a reward model's training."""

from __future__ import annotations

from ludus.proto.config import RewardModelRun
from ludus.proto.config.reward_model import MAX_DEFAULT_WARMUP_STEPS
from ludus.trainer.core.output import warn_user


class RateSchedule:
    """A learning rate that rises linearly during the warm-up, then decays to 0."""

    def __init__(self, run: RewardModelRun, num_steps: int) -> None:
        self._peak_rate = run.learning_rate
        self._num_steps = num_steps
        warmup_steps = run.warmup_steps
        if warmup_steps is None:
            warmup_steps = min(MAX_DEFAULT_WARMUP_STEPS, num_steps // 10)
        elif warmup_steps >= num_steps:
            highest_rate = run.learning_rate * num_steps / warmup_steps
            warn_user(
                f"warmup_steps = {warmup_steps}, but training has only {num_steps} steps: the "
                f"learning rate rises until the end, to {highest_rate:.2g} of "
                f"{run.learning_rate:.2g}; lower warmup_steps, or leave it out"
            )
        self._warmup_steps = warmup_steps

    def compute_rate(self, step: int) -> float:
        """Return the learning rate of step `step`, from 0."""
        if step < self._warmup_steps:
            return self._peak_rate * ((step + 1) / self._warmup_steps)
        num_decay_steps = max(1, self._num_steps - self._warmup_steps)
        return self._peak_rate * ((self._num_steps - step) / num_decay_steps)
