"""Conversion of evaluations and of workers' weights to the values of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ludus.proto.metrics import EvalMetric, TrainMetric
from ludus.proto.runs import PolicyResult, WorkerWeightsRow
from ludus.trainer.weights.canary import WorkerWeights


def compute_eval_values(
    result: PolicyResult, gap_closed: float | None = None
) -> Mapping[str, float]:
    """Return the results of a policy in an evaluation, by EvalMetric."""
    values: dict[str, float] = {
        EvalMetric.NUM_GAMES: result.num_games,
        EvalMetric.NUM_GAMES_VOID: result.num_void,
        EvalMetric.RETURN_MEAN: result.expected_return,
        EvalMetric.RETURN_CI95_LOW: result.expected_return_ci95[0],
        EvalMetric.RETURN_CI95_HIGH: result.expected_return_ci95[1],
        EvalMetric.INVALID_RATE: result.invalid_rate,
    }
    if result.win_rate is not None and result.win_rate_ci95 is not None:
        values[EvalMetric.WIN_RATE] = result.win_rate
        low, high = result.win_rate_ci95
        values |= {EvalMetric.WIN_RATE_CI95_LOW: low, EvalMetric.WIN_RATE_CI95_HIGH: high}
    if result.draw_rate is not None:
        values[EvalMetric.DRAW_RATE] = result.draw_rate
    if gap_closed is not None:
        values[EvalMetric.GAP_CLOSED] = gap_closed
    return values


def make_weights_row(worker: int, weights: WorkerWeights) -> WorkerWeightsRow:
    """Convert the weights of a worker to their form in a row."""
    return WorkerWeightsRow(
        worker=worker,
        version=weights.canary.version,
        content_hash=weights.canary.content_hash,
        canary_error=weights.canary.error,
    )


def compute_delivery_values(weights: Sequence[WorkerWeights]) -> Mapping[str, float]:
    """Return the time and bytes that a delivery cost the workers, by TrainMetric."""
    if not weights:
        return {}
    return {
        TrainMetric.WEIGHT_FETCH_S: max(worker.fetch_s for worker in weights),
        TrainMetric.SAMPLER_PAUSE_S: max(worker.pause_s for worker in weights),
        TrainMetric.WEIGHT_FETCH_BYTES: sum(worker.bytes_fetched for worker in weights),
    }
