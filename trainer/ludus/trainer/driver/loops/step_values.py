"""The values of a training step for metrics.jsonl and trace.jsonl, computed from its results.

counts by environment --> values by environment --combine_metrics--> values of the run --+
StepMetrics, StepTimes, canary --------------------------------------------------------+--> row

`combine_metrics` adds sums across environments, and derives means and ratios from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ludus.proto.metrics import REWARD_TERM_PREFIX, TrainMetric, combine_metrics
from ludus.proto.runs import DeliverySpan, PlaySpan, StepTrace
from ludus.trainer.data.buffer import TakenBatch
from ludus.trainer.data.counts import RolloutCounts, sum_counts
from ludus.trainer.learner.step_metrics import StepMetrics
from ludus.trainer.run.checkpoint import RunState

_MAX_PLAYS = 1_000
"""Maximum number of calls of workers in the trace of a step."""
_LEARNER_METRICS = [name for name in StepMetrics.__match_args__ if name in set(TrainMetric)]
"""Metrics that are fields of StepMetrics with the same names."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Durations of the phases of a training step."""

    wait_s: float
    """Time for which the learner waited for the batch."""
    train_s: float = 0.0
    """Time in the learner."""
    publish_s: float = 0.0
    """Time from the last update until workers could fetch its weights. The learner is idle."""
    deliveries: tuple[DeliverySpan, ...] = ()
    """Deliveries that finished since the last step. The next step runs during a delivery."""
    rollout_idle_s: float = 0.0
    """Time in which no group was played, because the staleness limit admitted none."""
    sync_bytes: int = 0
    """Size of the published weights."""

    @property
    def deliver_s(self) -> float:
        """Duration of the deliveries."""
        return sum(delivery.duration_s for delivery in self.deliveries)

    @property
    def total_s(self) -> float:
        """Duration of the step."""
        return self.wait_s + self.train_s + self.publish_s


def count_batch(state: RunState, batch: TakenBatch) -> None:
    """Add a trained batch to the counts of the run."""
    counts = sum_counts(batch.counts.values())
    state.games_trained += sum(group.num_scored for group in batch.groups)
    state.games_played += counts.num_episodes
    state.episodes_lost += counts.num_lost
    state.episodes_failed += counts.num_failed
    state.num_groups_rolled_back += counts.num_rolled_back_groups
    staleness = [group.staleness for group in batch.groups]
    state.max_staleness_seen = max(state.max_staleness_seen, *staleness)


def make_trace(step: int, times: StepTimes, plays: Sequence[PlaySpan]) -> StepTrace:
    """Return the trace of a step that ends now."""
    longest_plays = sorted(plays, key=lambda play: play.duration_s)[-_MAX_PLAYS:]
    return StepTrace(
        step=step,
        end_s=time.time(),
        wait_s=times.wait_s,
        train_s=times.train_s,
        publish_s=times.publish_s,
        plays=tuple(sorted(longest_plays, key=lambda play: play.start_s)),
        deliveries=times.deliveries,
    )


def compute_step_values(
    batch: TakenBatch,
    metrics: StepMetrics,
    times: StepTimes,
    canary_error: float,
    num_open_environments: int | None = None,
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the values of a training step: of the whole run, and by environment.

    Args:
        canary_error: largest difference of a worker's canary log-probs from the learner's.
        num_open_environments: number of environments that the curriculum has opened; None if
            there is no curriculum.
    """
    staleness: dict[str, list[int]] = {name: [] for name in batch.counts}
    for group in batch.groups:
        staleness.setdefault(group.environment, []).append(group.staleness)
    environment_values: dict[str, dict[str, float]] = {}
    for name in sorted(staleness):
        counts = batch.counts.get(name, RolloutCounts())
        environment_values[name] = _compute_environment_values(counts, staleness[name])
    totals = combine_metrics(environment_values.values()).items()
    # Reward terms of the same name in two environments may mean different things.
    run_values = {name: value for name, value in totals if not name.startswith(REWARD_TERM_PREFIX)}
    run_values |= compute_learner_values(metrics, times)
    run_values |= {
        TrainMetric.BUFFER_DEPTH_GROUPS: batch.num_waiting_groups,
        TrainMetric.CANARY_ERROR: canary_error,
        TrainMetric.NUM_STEPS_WITHOUT_VARIANCE: int(not batch.has_variance),
    }
    if num_open_environments is not None:
        run_values[TrainMetric.NUM_ENVIRONMENTS_OPEN] = num_open_environments
    if times.total_s > 0:
        num_tokens = run_values[TrainMetric.NUM_TOKENS_GENERATED]
        num_episodes = run_values[TrainMetric.NUM_EPISODES]
        run_values[TrainMetric.TOKENS_PER_SECOND] = num_tokens / times.total_s
        run_values[TrainMetric.EPISODES_PER_SECOND] = num_episodes / times.total_s
    return run_values, environment_values


def _compute_environment_values(
    counts: RolloutCounts, staleness: Sequence[int]
) -> dict[str, float]:
    """Return the values of one environment; a mean over no elements is left out."""
    num_finished = counts.num_wins + counts.num_draws + counts.num_losses
    values: dict[str, float] = {
        TrainMetric.NUM_EPISODES: counts.num_episodes,
        TrainMetric.NUM_EPISODES_FINISHED: num_finished,
        TrainMetric.NUM_EPISODES_SCORED: counts.num_scored,
        TrainMetric.NUM_EPISODES_LOST: counts.num_lost,
        TrainMetric.NUM_EPISODES_FAILED: counts.num_failed,
        TrainMetric.NUM_EPISODES_INVALID: counts.num_invalid,
        TrainMetric.NUM_EPISODES_TRUNCATED: counts.num_truncated,
        TrainMetric.NUM_TOOL_CALLS: counts.num_tool_calls,
        TrainMetric.NUM_TOOL_CALLS_FAILED: counts.num_tool_calls_failed,
        TrainMetric.NUM_EPISODES_WITH_TOOL_CALLS: counts.num_with_tool_calls,
        TrainMetric.NUM_BRANCHES: counts.num_branches,
        TrainMetric.NUM_FAILED_AGENTS: counts.num_dead_agents,
        TrainMetric.NUM_GROUPS: counts.num_groups,
        TrainMetric.NUM_ZERO_VARIANCE_GROUPS: counts.num_zero_variance_groups,
        TrainMetric.NUM_GROUPS_REPLACED: counts.num_replaced_groups,
        TrainMetric.NUM_GROUPS_KEPT: counts.num_kept_groups,
        TrainMetric.NUM_GROUPS_VOID: counts.num_void_groups,
        TrainMetric.NUM_GROUPS_STALE: counts.num_stale_groups,
        TrainMetric.NUM_GROUPS_ROLLED_BACK: counts.num_rolled_back_groups,
        TrainMetric.NUM_GROUPS_TRAINED: len(staleness),
        TrainMetric.NUM_TOKENS_GENERATED: counts.num_tokens_generated,
    }
    if counts.num_judged:
        values[TrainMetric.NUM_WINS] = counts.num_wins
        values[TrainMetric.NUM_DRAWS] = counts.num_draws
        values[TrainMetric.NUM_LOSSES] = counts.num_losses
        values[TrainMetric.WIN_RATE] = counts.num_wins / num_finished
    if counts.num_episodes:
        values[TrainMetric.NUM_TURNS_MEAN] = counts.num_turns / counts.num_episodes
    if counts.num_groups:
        ratio = counts.num_zero_variance_groups / counts.num_groups
        values[TrainMetric.ZERO_VARIANCE_GROUP_RATIO] = ratio
    if staleness:
        values[TrainMetric.STALENESS_MEAN] = sum(staleness) / len(staleness)
        values[TrainMetric.STALENESS_MAX] = max(staleness)
    return values | _compute_reward_values(counts)


def _compute_reward_values(counts: RolloutCounts) -> dict[str, float]:
    values: dict[str, float] = {}
    if counts.num_scored:
        mean = counts.reward_sum / counts.num_scored
        variance = max(0.0, counts.reward_square_sum / counts.num_scored - mean**2)
        values[TrainMetric.REWARD_MEAN] = mean
        values[TrainMetric.REWARD_STD] = math.sqrt(variance)
    for name, term in counts.terms.items():
        if term.num_scored:
            values[REWARD_TERM_PREFIX + name] = term.total / term.num_scored
    return values


def compute_learner_values(metrics: StepMetrics, times: StepTimes) -> dict[str, float]:
    """Return the values that the learner measured, without values that are not finite."""
    values: dict[str, float] = {
        TrainMetric.STEP_S: times.total_s,
        TrainMetric.WAIT_FOR_BATCH_S: times.wait_s,
        TrainMetric.TRAIN_S: times.train_s,
        TrainMetric.PUBLISH_S: times.publish_s,
        TrainMetric.DELIVER_S: times.deliver_s,
        TrainMetric.ROLLOUT_IDLE_S: times.rollout_idle_s,
        TrainMetric.WEIGHT_SYNC_S: times.publish_s + times.deliver_s,
        TrainMetric.WEIGHT_SYNC_BYTES: times.sync_bytes,
    }
    for name in _LEARNER_METRICS:
        value = getattr(metrics, name)
        if value is not None:
            values[name] = value
    if metrics.peak_flops and times.train_s > 0:
        values[TrainMetric.MFU] = metrics.flops / (times.train_s * metrics.peak_flops)
    # JSON has only finite numbers. num_skipped_updates explains why a value is missing.
    return {name: value for name, value in values.items() if math.isfinite(value)}
