"""Progress of a run, computed from its metrics rows without a terminal or a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from ludus.proto.metrics import EvalMetric, TrainMetric, combine_metric
from ludus.proto.runs import MetricsRow, Phase
from ludus.services.numbers import (
    format_compact,
    format_duration,
    format_fixed,
    format_percent,
    format_percent_interval,
)

PACE_WINDOW = 20
"""Number of recent training steps from which the remaining time is estimated."""
MEAN_WINDOW = 10
"""Number of recent training steps over which reward and rates are averaged."""

PHASE_NAMES = {
    Phase.START_ENVIRONMENT: "starting the environment",
    Phase.PREPARE_MODEL: "preparing the model",
    Phase.START_WORKERS: "starting workers",
    Phase.EVALUATE: "evaluating",
    Phase.TRAIN: "training",
    Phase.SAVE_CHECKPOINT: "saving a checkpoint",
    Phase.DONE: "done",
}


class RunProgress:
    """Progress of a run, updated with each metrics row."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.step = 0
        self.num_games_trained = 0
        self.phase: Phase | None = None
        self.is_stopping = False
        self.waiting_reason = ""
        """Reason why a run on a cluster is waiting; empty while it makes progress."""
        self._num_void: dict[int, dict[str, int]] = {}
        """Void episodes by step. After a restart of the learner, a step's row arrives again."""
        self._evals: dict[str, dict[str, float]] = {}
        """Latest evaluation of each environment."""
        self._num_open = 0
        """Number of environments that the curriculum has opened; 0 without a curriculum."""
        self._newest_open = ""
        self._recent: deque[dict[str, float]] = deque(maxlen=MEAN_WINDOW)
        self._pace: deque[tuple[int, float]] = deque(maxlen=PACE_WINDOW + 1)

    def update(self, rows: Iterable[MetricsRow]) -> None:
        """Apply new rows."""
        for row in rows:
            match row.kind:
                case "phase":
                    self.phase = row.phase
                    self.num_steps = row.num_steps or self.num_steps
                case "eval":
                    self._take_place(row)
                    self._evals[row.environment or ""] = row.values
                case "train":
                    self._take_place(row)
                    self._take_step(row)
                    self._take_open(row)
                case "event" if TrainMetric.NUM_UNLOCKS in row.values:
                    self._newest_open = row.environment or ""

    @property
    def num_episodes_lost(self) -> int:
        """Number of episodes that were lost."""
        return self._total_void(TrainMetric.NUM_EPISODES_LOST)

    @property
    def num_episodes_failed(self) -> int:
        """Number of episodes that failed."""
        return self._total_void(TrainMetric.NUM_EPISODES_FAILED)

    @property
    def phase_name(self) -> str:
        """Readable name of the current phase."""
        if self.is_stopping:
            return "stopping, writing a checkpoint"
        if self.waiting_reason:
            return self.waiting_reason
        return "starting" if self.phase is None else PHASE_NAMES[self.phase]

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the last training step; None while unknown."""
        if len(self._pace) < 2:
            return None
        (first_step, first_s), (last_step, last_s) = self._pace[0], self._pace[-1]
        if last_step <= first_step:
            return None
        return (self.num_steps - last_step) * (last_s - first_s) / (last_step - first_step)

    def facts(self) -> dict[str, str]:
        """Return the available facts as text, in display order."""
        facts = self._eval_facts() | {
            "reward": _decimal(self._lately(TrainMetric.REWARD_MEAN)),
            "episodes": f"{self.num_games_trained:,}" if self.num_games_trained else None,
            "open environments": self._open_environments(),
            "episodes/s": _compact(self._lately(TrainMetric.EPISODES_PER_SECOND)),
            "tokens/s": _compact(self._lately(TrainMetric.TOKENS_PER_SECOND)),
            "staleness": _compact(self._lately(TrainMetric.STALENESS_MEAN)),
            "zero-variance groups": _percent(self._lately(TrainMetric.ZERO_VARIANCE_GROUP_RATIO)),
            "canary error": _compact(self._lately(TrainMetric.CANARY_ERROR)),
            "lost episodes": _count(self.num_episodes_lost),
            "failed episodes": _count(self.num_episodes_failed),
        }
        return {name: text for name, text in facts.items() if text is not None}

    def line(self) -> str:
        """Format the progress as one line, for logs."""
        parts = [f"step {self.step}/{self.num_steps}", self.phase_name]
        parts += [f"{name} {text}" for name, text in self.facts().items()]
        if self.seconds_left is not None and self.step < self.num_steps:
            parts.append(f"{format_duration(self.seconds_left)} left")
        return " · ".join(parts)

    def _take_step(self, row: MetricsRow) -> None:
        self._recent.append(row.values)
        self._pace.append((row.step, row.elapsed_s))
        self._num_void[row.step] = {
            metric: int(row.values.get(metric, 0))
            for metric in (TrainMetric.NUM_EPISODES_LOST, TrainMetric.NUM_EPISODES_FAILED)
        }

    def _take_open(self, row: MetricsRow) -> None:
        num_open = int(row.values.get(TrainMetric.NUM_ENVIRONMENTS_OPEN, 0))
        if num_open < self._num_open:
            # After a restart of the learner, the curriculum has closed the environment again.
            self._newest_open = ""
        self._num_open = num_open

    def _open_environments(self) -> str | None:
        if not self._num_open:
            return None
        return f"{self._num_open}, newest {self._newest_open}" if self._newest_open else "1"

    def _total_void(self, metric: TrainMetric) -> int:
        return sum(counts[metric] for counts in self._num_void.values())

    def _take_place(self, row: MetricsRow) -> None:
        # The latest row, not the largest step: a restarted learner repeats some steps.
        self.step, self.num_games_trained = row.step, row.num_games_trained

    def _lately(self, metric: TrainMetric) -> float | None:
        return combine_metric(metric, self._recent)

    def _eval_facts(self) -> dict[str, str | None]:
        if len(self._evals) != 1:
            return dict(_eval_fact(name, values) for name, values in self._evals.items())
        (values,) = self._evals.values()
        return {"wins": _wins(values), "return": _decimal(values.get(EvalMetric.RETURN_MEAN))}


def _eval_fact(environment: str, values: Mapping[str, float]) -> tuple[str, str | None]:
    """Return the win rate of one of several environments, or its return if it has none."""
    if EvalMetric.WIN_RATE in values:
        return f"wins in {environment}", _wins(values)
    return f"return in {environment}", _decimal(values.get(EvalMetric.RETURN_MEAN))


def _wins(values: Mapping[str, float]) -> str | None:
    if EvalMetric.WIN_RATE not in values:
        return None
    text = format_percent(values[EvalMetric.WIN_RATE])
    if EvalMetric.WIN_RATE_CI95_LOW in values and EvalMetric.WIN_RATE_CI95_HIGH in values:
        interval = values[EvalMetric.WIN_RATE_CI95_LOW], values[EvalMetric.WIN_RATE_CI95_HIGH]
        text += f" ({format_percent_interval(interval)})"
    return text


def _count(number: int) -> str | None:
    return f"{number:,}" if number else None


def _decimal(value: float | None) -> str | None:
    return None if value is None else format_fixed(value, 3)


def _compact(value: float | None) -> str | None:
    return None if value is None else format_compact(value)


def _percent(value: float | None) -> str | None:
    return None if value is None else format_percent(value, 0)
