"""The rows of metrics.jsonl, computed from what each step and evaluation returned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ludus.proto.metrics import EvalMetric, TrainMetric
from ludus.proto.runs import EvalReport
from ludus.trainer.actors.buffer import TakenGroups
from ludus.trainer.learner.learner import StepMetrics


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a training step's time went."""

    wait_s: float
    """For the batch."""
    train_s: float
    sync_s: float
    """From the last update until every worker samples from it."""
    sync_bytes: int

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.wait_s + self.train_s + self.sync_s


def train_values(
    taken: TakenGroups,
    metrics: StepMetrics,
    staleness: Sequence[int],
    times: StepTimes,
    canary_error: float,
) -> Mapping[str, float]:
    """The values of a training step's row, by TrainMetric."""
    counts = taken.counts
    num_scored = max(1, counts.num_episodes - counts.num_lost)
    reward_mean = counts.reward_sum / num_scored
    variance = max(0.0, counts.reward_square_sum / num_scored - reward_mean**2)
    return {
        TrainMetric.LOSS: metrics.loss,
        TrainMetric.REWARD_MEAN: reward_mean,
        TrainMetric.REWARD_STD: math.sqrt(variance),
        TrainMetric.WIN_RATE: counts.num_wins / num_scored,
        TrainMetric.NUM_EPISODES: counts.num_episodes,
        TrainMetric.NUM_EPISODES_LOST: counts.num_lost,
        TrainMetric.NUM_EPISODES_INVALID: counts.num_invalid,
        TrainMetric.NUM_EPISODES_TRUNCATED: counts.num_truncated,
        TrainMetric.NUM_TURNS_MEAN: counts.num_turns / max(1, counts.num_episodes),
        TrainMetric.DEAD_GROUP_RATIO: counts.num_dead_groups / max(1, counts.num_groups),
        TrainMetric.STALENESS_MEAN: sum(staleness) / len(staleness),
        TrainMetric.STALENESS_MAX: max(staleness),
        TrainMetric.MISMATCH_KL: metrics.mismatch_kl,
        TrainMetric.REFERENCE_KL: metrics.reference_kl,
        TrainMetric.ENTROPY: metrics.entropy,
        TrainMetric.CLIP_RATIO: metrics.clip_ratio,
        TrainMetric.MASKED_SEQUENCE_RATIO: metrics.masked_sequence_ratio,
        TrainMetric.GRAD_NORM: metrics.grad_norm,
        TrainMetric.LEARNING_RATE: metrics.learning_rate,
        TrainMetric.NUM_TOKENS_GENERATED: counts.num_tokens_generated,
        TrainMetric.NUM_TOKENS_TRAINED: metrics.num_tokens_trained,
        TrainMetric.NUM_TOKENS_FORWARDED: metrics.num_tokens_forwarded,
        TrainMetric.BUFFER_DEPTH_GROUPS: taken.depth,
        TrainMetric.WAIT_FOR_BATCH_S: times.wait_s,
        TrainMetric.TRAIN_S: times.train_s,
        TrainMetric.WEIGHT_SYNC_S: times.sync_s,
        TrainMetric.WEIGHT_SYNC_BYTES: times.sync_bytes,
        TrainMetric.CANARY_ERROR: canary_error,
        TrainMetric.TOKENS_PER_SECOND: counts.num_tokens_generated / times.total_s,
        TrainMetric.EPISODES_PER_SECOND: counts.num_episodes / times.total_s,
    }


def eval_values(report: EvalReport) -> Mapping[str, float]:
    """The values of an evaluation's row, by EvalMetric."""
    policy = report.policy
    values: dict[str, float] = {
        EvalMetric.NUM_GAMES: policy.num_games,
        EvalMetric.WIN_RATE: policy.win_rate,
        EvalMetric.WIN_RATE_CI95_LOW: policy.win_rate_ci95[0],
        EvalMetric.WIN_RATE_CI95_HIGH: policy.win_rate_ci95[1],
        EvalMetric.DRAW_RATE: policy.draw_rate,
        EvalMetric.RETURN_MEAN: policy.expected_return,
        EvalMetric.RETURN_CI95_LOW: policy.expected_return_ci95[0],
        EvalMetric.RETURN_CI95_HIGH: policy.expected_return_ci95[1],
        EvalMetric.INVALID_RATE: policy.invalid_rate,
    }
    if report.gap_closed is not None:
        values[EvalMetric.GAP_CLOSED] = report.gap_closed
    return values
