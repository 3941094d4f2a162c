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

_METRICS: Mapping[str, str] = {
    "loss": TrainMetric.LOSS,
    "grad_norm": TrainMetric.GRAD_NORM,
    "learning_rate": TrainMetric.LEARNING_RATE,
    "reward": TrainMetric.REWARD_MEAN,
    "reward_std": TrainMetric.REWARD_STD,
    "frac_reward_zero_std": TrainMetric.ZERO_VARIANCE_GROUP_RATIO,
    "entropy": TrainMetric.ENTROPY,
    "kl": TrainMetric.REFERENCE_KL,
    "clip_ratio/region_mean": TrainMetric.CLIP_RATIO,
    "step_time": TrainMetric.STEP_S,
}
"""Metrics of a run by TRL's names."""


class TrainOutput(NamedTuple):
    """The result of `train`."""

    global_step: int
    """Number of optimizer steps."""
    training_loss: float
    """Mean loss of the run."""
    metrics: dict[str, float]


@dataclass(slots=True)
class TrainerState:
    """The progress of training."""

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
    _pending: list[dict[str, float]] = field(default_factory=list)

    def add(self, step: Step, args: GRPOConfig, batches: Batches) -> None:
        """Record the metrics of a trained batch, and log them when due."""
        last_step = self.global_step
        self.global_step = step.number * batches.num_updates
        self.epoch = step.number / batches.per_epoch
        values = _metric_values(step)
        self.num_input_tokens_seen += int(step.values[TrainMetric.NUM_TOKENS_IN_BATCH])
        self._losses.append(values["loss"])
        self._pending.append(values)
        if self._is_due(last_step, args, batches, step.number):
            self._log()
        progress = {"epoch": self.epoch, "step": self.global_step}
        for report in (step.evaluation or {}).values():
            self.log_history.append({"eval_reward": report.policy.expected_return, **progress})

    def finish(self) -> TrainOutput:
        """Log pending values and return the final result."""
        if self._pending:
            self._log()
        mean = sum(self._losses) / max(1, len(self._losses))
        return TrainOutput(self.global_step, mean, {"train_loss": mean, "epoch": self.epoch})

    def _is_due(self, last_step: int, args: GRPOConfig, batches: Batches, number: int) -> bool:
        if args.logging_strategy == "no":
            return False
        if args.logging_first_step and number == 1:
            return True
        every = args.logging_steps
        if args.logging_strategy == "epoch":
            every = batches.per_epoch * batches.num_updates
        elif every < 1:
            every *= batches.num_optimizer_steps
        return int(last_step // every) < int(self.global_step // every)

    def _log(self) -> None:
        pending_logs, self._pending = self._pending, []
        names = dict.fromkeys(name for values in pending_logs for name in values)
        entry: dict[str, Any] = {
            name: fmean(values[name] for values in pending_logs if name in values) for name in names
        }
        # Like TRL, log the latest learning rate, not the mean.
        entry["learning_rate"] = pending_logs[-1].get("learning_rate", 0.0)
        entry["num_tokens"] = self.num_input_tokens_seen
        self.log_history.append(entry | {"epoch": self.epoch, "step": self.global_step})


def _metric_values(step: Step) -> dict[str, float]:
    values = {
        name: step.values[metric] for name, metric in _METRICS.items() if metric in step.values
    }
    episodes = step.values[TrainMetric.NUM_EPISODES]
    if episodes:
        tokens = step.values[TrainMetric.NUM_TOKENS_GENERATED]
        values["completions/mean_length"] = tokens / episodes
        num_truncated = step.values[TrainMetric.NUM_EPISODES_TRUNCATED]
        values["completions/clipped_ratio"] = num_truncated / episodes
    for environment_values in step.environments.values():
        for name, value in environment_values.items():
            if name.startswith(REWARD_TERM_PREFIX):
                values[f"rewards/{name.removeprefix(REWARD_TERM_PREFIX)}/mean"] = value
    return values
