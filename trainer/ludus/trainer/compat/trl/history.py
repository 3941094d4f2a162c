"""`trainer.state` and the result of `trainer.train()`, with TRL's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from ludus.proto.metrics import REWARD_TERM_PREFIX, TrainMetric
from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.compat.trl.run_settings import Batches
from ludus.trainer.driver.loops.steps import Step

_METRIC_BY_TRL_NAME: Mapping[str, str] = {
    "loss": TrainMetric.LOSS,
    "grad_norm": TrainMetric.GRAD_NORM,
    "learning_rate": TrainMetric.LEARNING_RATE,
    "reward": TrainMetric.REWARD_MEAN,
    "reward_std": TrainMetric.REWARD_STD,
    "frac_reward_zero_std": TrainMetric.ZERO_VARIANCE_GROUP_RATIO,
    "entropy": TrainMetric.ENTROPY,
    "entropy_coef": TrainMetric.ENTROPY_COEF,
    "kl": TrainMetric.REFERENCE_KL,
    "clip_ratio/region_mean": TrainMetric.CLIP_RATIO,
    "step_time": TrainMetric.STEP_S,
}
"""Metric of a run by the name that TRL logs."""


class TrainOutput(NamedTuple):
    """Results of `train`, with TRL's names."""

    global_step: int
    """Number of optimizer steps."""
    training_loss: float
    """Mean loss of the run."""
    metrics: dict[str, float]


@dataclass(slots=True)
class TrainerState:
    """The progress of a training, with TRL's names."""

    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    global_step: int = 0
    """Number of optimizer steps."""
    epoch: float = 0.0
    max_steps: int = 0
    """Number of optimizer steps of the whole run."""
    num_train_epochs: float = 0.0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """Logged entries, each with means over the steps since the previous entry."""
    num_input_tokens_seen: int = 0
    _losses: list[float] = field(default_factory=list)
    _pending_values: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def start(cls, args: GRPOConfig, batches: Batches) -> TrainerState:
        """Return the state of a training before its first step."""
        return cls(max_steps=batches.num_optimizer_steps, num_train_epochs=args.num_train_epochs)

    def add(self, step: Step, args: GRPOConfig, batches: Batches) -> None:
        """Record the metrics of a trained batch, and log them when due."""
        previous_step = self.global_step
        self.global_step = step.number * batches.num_updates
        self.epoch = step.number / batches.num_batches_per_epoch
        values = _collect_values(step)
        self.num_input_tokens_seen += int(step.values[TrainMetric.NUM_TOKENS_IN_BATCH])
        self._losses.append(values["loss"])
        self._pending_values.append(values)
        if self._is_due(previous_step, args, batches, step.number):
            self._log()
        progress = {"epoch": self.epoch, "step": self.global_step}
        for report in (step.evaluation or {}).values():
            self.log_history.append({"eval_reward": report.policy.expected_return, **progress})

    def finish(self, seconds: float) -> TrainOutput:
        """Log pending values and return the final result of a training of this duration."""
        if self._pending_values:
            self._log()
        loss = sum(self._losses) / max(1, len(self._losses))
        speeds = {"train_runtime": seconds, "train_steps_per_second": self.global_step / seconds}
        metrics = {**speeds, "train_loss": loss, "epoch": self.epoch}
        return TrainOutput(self.global_step, loss, metrics)

    def _is_due(self, previous_step: int, args: GRPOConfig, batches: Batches, number: int) -> bool:
        """Return whether to log after the batch with this number, which starts at 1."""
        if args.logging_strategy == "no":
            return False
        if args.logging_first_step and number == 1:
            return True
        interval = args.logging_steps
        if args.logging_strategy == "epoch":
            interval = batches.num_batches_per_epoch * batches.num_updates
        elif interval < 1:
            interval *= batches.num_optimizer_steps
        return int(previous_step // interval) < int(self.global_step // interval)

    def _log(self) -> None:
        logged_values, self._pending_values = self._pending_values, []
        names = dict.fromkeys(name for values in logged_values for name in values)
        entry: dict[str, Any] = {
            name: fmean(values[name] for values in logged_values if name in values)
            for name in names
        }
        # Like TRL, log the latest learning rate, not the mean.
        entry["learning_rate"] = logged_values[-1].get("learning_rate", 0.0)
        entry["num_tokens"] = self.num_input_tokens_seen
        self.log_history.append(entry | {"epoch": self.epoch, "step": self.global_step})


def _collect_values(step: Step) -> dict[str, float]:
    values = {
        name: step.values[metric]
        for name, metric in _METRIC_BY_TRL_NAME.items()
        if metric in step.values
    }
    num_episodes = step.values[TrainMetric.NUM_EPISODES]
    if num_episodes:
        num_tokens = step.values[TrainMetric.NUM_TOKENS_GENERATED]
        values["completions/mean_length"] = num_tokens / num_episodes
        num_truncated = step.values[TrainMetric.NUM_EPISODES_TRUNCATED]
        values["completions/clipped_ratio"] = num_truncated / num_episodes
    for environment_values in step.environments.values():
        for name, value in environment_values.items():
            if name.startswith(REWARD_TERM_PREFIX):
                values[f"rewards/{name.removeprefix(REWARD_TERM_PREFIX)}/mean"] = value
    return values
