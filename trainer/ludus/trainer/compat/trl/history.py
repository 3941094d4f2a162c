"""What `trainer.state` and `trainer.train()` say, under TRL's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ludus.proto.metrics import REWARD_TERM_PREFIX, TrainMetric
from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.compat.trl.run_settings import Batches
from ludus.trainer.driver.loops.steps import Step

_NAMES: Mapping[str, str] = {
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
"""TRL's names of what a run measures."""


class TrainOutput(NamedTuple):
    """What `train` returns."""

    global_step: int
    """Optimizer steps."""
    training_loss: float
    """Mean over the run."""
    metrics: dict[str, float]


@dataclass(slots=True)
class TrainerState:
    """Where training stands."""

    global_step: int = 0
    """Optimizer steps."""
    epoch: float = 0.0
    max_steps: int = 0
    """Optimizer steps of the whole run."""
    num_train_epochs: float = 0.0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """One entry for each time that it was logged, means over the steps since the one before."""
    num_input_tokens_seen: int = 0
    _losses: list[float] = field(default_factory=list)
    _waiting: list[dict[str, float]] = field(default_factory=list)

    def add(self, step: Step, args: GRPOConfig, batches: Batches) -> None:
        """Take a batch in that was trained on, and log it where it is time."""
        before = self.global_step
        self.global_step = step.number * batches.num_updates
        self.epoch = step.number / batches.per_epoch
        values = _values(step)
        self.num_input_tokens_seen += int(step.values[TrainMetric.NUM_TOKENS_IN_BATCH])
        self._losses.append(values["loss"])
        self._waiting.append(values)
        if self._is_due(before, args, batches, step.number):
            self._log()
        if step.evaluation is not None:
            self._log_evaluation(step)

    def end(self) -> TrainOutput:
        """What the training came to; what was not logged yet is."""
        if self._waiting:
            self._log()
        mean = sum(self._losses) / max(1, len(self._losses))
        return TrainOutput(self.global_step, mean, {"train_loss": mean, "epoch": self.epoch})

    def _is_due(self, before: int, args: GRPOConfig, batches: Batches, number: int) -> bool:
        strategy = str(getattr(args.logging_strategy, "value", args.logging_strategy))
        if strategy == "no":
            return False
        if args.logging_first_step and number == 1:
            return True
        every = args.logging_steps
        if strategy == "epoch":
            every = batches.per_epoch * batches.num_updates
        elif every < 1:
            every *= batches.num_optimizer_steps
        return int(before // every) < int(self.global_step // every)

    def _log(self) -> None:
        waiting, self._waiting = self._waiting, []
        names = dict.fromkeys(name for values in waiting for name in values)
        found = {name: [one[name] for one in waiting if name in one] for name in names}
        entry: dict[str, Any] = {name: sum(of) / len(of) for name, of in found.items()}
        # As TRL's, it is the newest, no mean.
        entry["learning_rate"] = waiting[-1].get("learning_rate", 0.0)
        entry["num_tokens"] = self.num_input_tokens_seen
        self.log_history.append(entry | {"epoch": self.epoch, "step": self.global_step})

    def _log_evaluation(self, step: Step) -> None:
        assert step.evaluation is not None
        for report in step.evaluation.values():
            self.log_history.append(
                {
                    "eval_reward": report.policy.expected_return,
                    "epoch": self.epoch,
                    "step": self.global_step,
                }
            )


def _values(step: Step) -> dict[str, float]:
    values = {name: step.values[own] for name, own in _NAMES.items() if own in step.values}
    episodes = step.values[TrainMetric.NUM_EPISODES]
    if episodes:
        tokens = step.values[TrainMetric.NUM_TOKENS_GENERATED]
        values["completions/mean_length"] = tokens / episodes
        cut = step.values[TrainMetric.NUM_EPISODES_TRUNCATED]
        values["completions/clipped_ratio"] = cut / episodes
    for environment_values in step.environments.values():
        for name, value in environment_values.items():
            if name.startswith(REWARD_TERM_PREFIX):
                values[f"rewards/{name.removeprefix(REWARD_TERM_PREFIX)}/mean"] = value
    return values
