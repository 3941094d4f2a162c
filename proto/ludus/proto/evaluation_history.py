"""The results of a run's evaluations, which decide which checkpoint is the best.

    rows of metrics.jsonl --> EvaluationHistory --+--> the trainer: keep this checkpoint
                                                  +--> RUN@best

The score of an evaluation is the share of the gap that the policy closes, the win rate, or the mean
return: the first of these that the first evaluation has in every environment. Several environments
count equally. A fine-tuning run is scored by its validation loss. The policy before training is
never the best, because it has no checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ludus.proto.metrics import EvalMetric, TrainMetric
from ludus.proto.runs import METRICS_FILE, MetricsRow

_METRICS = (
    EvalMetric.GAP_CLOSED,
    EvalMetric.WIN_RATE,
    EvalMetric.RETURN_MEAN,
    TrainMetric.VALIDATION_LOSS,
)
_ROW_MARKS = (b'"eval"', b'"event"')
"""Parts of the lines of metrics.jsonl that may contain a result."""


@dataclass(frozen=True, slots=True)
class StepScore:
    """The score of the evaluation after a training step."""

    step: int
    metric: str
    """Name of the metric: an EvalMetric, or that of the validation loss."""
    value: float
    """Mean of the metric over the environments."""


class EvaluationHistory:
    """The results of a run's evaluations, by step."""

    def __init__(self, rows: Iterable[MetricsRow] = ()) -> None:
        self._results: dict[int, dict[str | None, Mapping[str, float]]] = {}
        """Values of each evaluation, by step and environment."""
        for row in rows:
            self.add(row)

    @property
    def num_evaluations(self) -> int:
        """Number of steps with an evaluation, including the policy before training."""
        return len(self._results)

    def add(self, row: MetricsRow) -> None:
        """Add the result that a row of metrics.jsonl contains, if it contains one."""
        is_validation = row.kind == "event" and TrainMetric.VALIDATION_LOSS in row.values
        if row.kind == "eval" or is_validation:
            self._results.setdefault(row.step, {})[row.environment] = row.values

    def drop_after(self, step: int) -> None:
        """Drop the results of later steps."""
        self._results = {
            result_step: result
            for result_step, result in self._results.items()
            if result_step <= step
        }

    def find_best(self, steps: Iterable[int]) -> StepScore | None:
        """Return the best score of these steps, the earliest of equal ones.

        None if the run was not evaluated after any of them.
        """
        metric = self._choose_metric()
        if metric is None:
            return None
        scores = {step: self._compute_score(step, metric) for step in sorted(steps) if step > 0}
        sign = -1 if metric == TrainMetric.VALIDATION_LOSS else 1
        finite_scores = {step: score for step, score in scores.items() if math.isfinite(score)}
        if not finite_scores:
            return None
        best_step = max(finite_scores, key=lambda step: sign * finite_scores[step])
        return StepScore(best_step, metric, finite_scores[best_step])

    def _choose_metric(self) -> str | None:
        if not self._results:
            return None
        first_result = self._results[min(self._results)].values()
        available = [name for name in _METRICS if all(name in values for values in first_result)]
        return next(iter(available), None)

    def _compute_score(self, step: int, metric: str) -> float:
        """Return the mean over the environments of the first evaluation; NaN if one is missing."""
        environments = self._results[min(self._results)]
        result = self._results.get(step, {})
        values = [result.get(environment, {}).get(metric, math.nan) for environment in environments]
        return sum(values) / len(values)


def read_evaluation_history(run_folder: Path) -> EvaluationHistory:
    """Return the results of a run's evaluations so far, without lines that cannot be read."""
    history = EvaluationHistory()
    with suppress(FileNotFoundError), (run_folder / METRICS_FILE).open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and any(mark in line for mark in _ROW_MARKS):
                with suppress(ValidationError):
                    history.add(MetricsRow.model_validate_json(line))
    return history
