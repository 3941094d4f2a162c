"""Tests of the metrics that are computed after a training step."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import DeliverySpan
from ludus.trainer.core.types import Rollout, RolloutGroup, RolloutStatus, ScoredTerm
from ludus.trainer.data.buffer import TakenBatch, summarize
from ludus.trainer.data.counts import RolloutCounts, TermSum, count_group, sum_counts
from ludus.trainer.driver.loops.step_values import StepTimes, compute_step_values
from ludus.trainer.learner.step_metrics import StepMetrics

STEP_TIMES = StepTimes(
    wait_s=0.5,
    train_s=1.0,
    publish_s=0.5,
    deliveries=(DeliverySpan(version=3, start_s=10.0, end_s=10.25),),
    rollout_idle_s=0.125,
    sync_bytes=640,
)
LEARNER_METRICS = StepMetrics(
    loss=0.25,
    grad_norm=1.0,
    learning_rate=1e-3,
    entropy_coef=0.01,
    entropy=0.5,
    clip_ratio=0.0,
    mismatch_kl=1e-8,
    reference_kl=0.0,
    masked_sequence_ratio=0.0,
    masked_token_ratio=0.0,
    value_loss=None,
    explained_variance=None,
    num_tokens_trained=100,
    num_tokens_in_batch=300,
    num_tokens_forwarded=200,
)


def make_group(environment: str, rewards: list[float | None], version: int = 0) -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            environment=environment,
            seed=1,
            sequences=(),
            reward=reward,
            episode_return=reward,
            terms=(ScoredTerm("game", reward), ScoredTerm("format", 0.5)),
            status=RolloutStatus.LOST if reward is None else RolloutStatus.TERMINATED,
            policy_version=version,
            success=None if reward is None else reward > 0,
        )
        for reward in rewards
    )
    return RolloutGroup(0, environment, rollouts)


def make_batch(*groups: RolloutGroup, refused_groups: tuple[RolloutGroup, ...] = ()) -> TakenBatch:
    counts: dict[str, RolloutCounts] = {}
    for group in (*groups, *refused_groups):
        counts[group.environment] = sum_counts(
            [counts.get(group.environment, RolloutCounts()), count_group(group)]
        )
    return TakenBatch(
        tuple(summarize(group, version=2) for group in groups), counts, num_waiting_groups=3
    )


MIXED_BATCH = make_batch(
    make_group("blackjack", [1.0, -1.0, 0.0, None]),
    make_group("catch", [1.0, 1.0, 1.0, -1.0], version=2),
    make_group("catch", [1.0, -1.0], version=1),
    refused_groups=(make_group("catch", [1.0, 1.0]),),
)


def test_environment_without_reported_success_has_no_win_metrics() -> None:
    pole_group = make_group("pole", [200.0, 17.0])
    rollouts = tuple(dataclasses.replace(rollout, success=None) for rollout in pole_group.rollouts)
    values, values_by_environment = compute_step_values(
        make_batch(
            dataclasses.replace(pole_group, rollouts=rollouts), make_group("catch", [1.0, -1.0])
        ),
        LEARNER_METRICS,
        STEP_TIMES,
        canary_error=0.0,
    )
    win_metrics = {TrainMetric.WIN_RATE, "num_wins", "num_draws", "num_losses"}
    assert not win_metrics & values_by_environment["pole"].keys()
    assert values_by_environment["pole"][TrainMetric.NUM_EPISODES_FINISHED] == 2
    assert values_by_environment["catch"][TrainMetric.WIN_RATE] == 0.5
    assert values[TrainMetric.WIN_RATE] == 0.5


def test_run_metrics_combine_all_environments() -> None:
    values = compute_step_values(MIXED_BATCH, LEARNER_METRICS, STEP_TIMES, canary_error=1e-7)[0]
    group_summaries = tuple(
        dataclasses.replace(group, environment="combined") for group in MIXED_BATCH.groups
    )
    counts = {"combined": sum_counts(MIXED_BATCH.counts.values())}
    combined_batch = TakenBatch(group_summaries, counts, num_waiting_groups=3)
    assert values == pytest.approx(
        compute_step_values(combined_batch, LEARNER_METRICS, STEP_TIMES, canary_error=1e-7)[0]
    )
    assert values[TrainMetric.NUM_EPISODES] == 12
    assert values[TrainMetric.WIN_RATE] == pytest.approx(7 / 11)
    assert values[TrainMetric.REWARD_MEAN] == pytest.approx(4 / 11)
    assert values[TrainMetric.STALENESS_MEAN] == pytest.approx(1.0)
    assert values[TrainMetric.STALENESS_MAX] == 2
    assert values[TrainMetric.BUFFER_DEPTH_GROUPS] == 3
    assert values[TrainMetric.STEP_S] == 2.0
    assert values[TrainMetric.WEIGHT_SYNC_S] == 0.75
    assert values[TrainMetric.ROLLOUT_IDLE_S] == 0.125
    assert values[TrainMetric.EPISODES_PER_SECOND] == 6.0


def test_environment_metrics_exclude_learner_metrics() -> None:
    _, values_by_environment = compute_step_values(
        MIXED_BATCH, LEARNER_METRICS, STEP_TIMES, canary_error=1e-7
    )
    blackjack_metrics = values_by_environment["blackjack"]
    catch_metrics = values_by_environment["catch"]
    assert blackjack_metrics[TrainMetric.NUM_WINS] == 1
    assert blackjack_metrics[TrainMetric.NUM_DRAWS] == 1
    assert blackjack_metrics[TrainMetric.NUM_LOSSES] == 1
    assert blackjack_metrics[TrainMetric.NUM_EPISODES_LOST] == 1
    assert blackjack_metrics[TrainMetric.STALENESS_MAX] == 2
    assert catch_metrics[TrainMetric.ZERO_VARIANCE_GROUP_RATIO] == pytest.approx(1 / 3)
    assert catch_metrics[TrainMetric.NUM_GROUPS] == 3
    assert catch_metrics[TrainMetric.NUM_GROUPS_TRAINED] == 2
    assert catch_metrics[TrainMetric.STALENESS_MEAN] == 0.5
    assert catch_metrics["reward_term.game"] == pytest.approx(0.5)
    assert catch_metrics["reward_term.format"] == 0.5
    for environment_metrics in values_by_environment.values():
        metrics_by_name = {str(metric): metric for metric in TrainMetric}
        assert all(
            metrics_by_name[name].spec.is_per_environment
            for name in environment_metrics
            if not name.startswith("reward_term.")
        )


def test_tool_calls_are_counted_per_environment_and_per_run() -> None:
    counts = {
        "calculator": RolloutCounts(
            num_episodes=4, num_tool_calls=6, num_tool_calls_failed=2, num_with_tool_calls=3
        ),
        "catch": RolloutCounts(num_episodes=4),
    }
    values, values_by_environment = compute_step_values(
        TakenBatch((), counts, 0), LEARNER_METRICS, STEP_TIMES, canary_error=0.0
    )
    for metrics in (values, values_by_environment["calculator"]):
        assert metrics[TrainMetric.NUM_TOOL_CALLS] == 6
        assert metrics[TrainMetric.NUM_TOOL_CALLS_FAILED] == 2
        assert metrics[TrainMetric.NUM_EPISODES_WITH_TOOL_CALLS] == 3
    assert values_by_environment["catch"][TrainMetric.NUM_TOOL_CALLS] == 0


def test_means_without_episodes_are_omitted() -> None:
    void_counts = {"blackjack": RolloutCounts(num_episodes=2, num_lost=2, num_groups=1)}
    counts = void_counts | {"catch": RolloutCounts(terms={"format": TermSum(0, 0.0)})}
    values, values_by_environment = compute_step_values(
        TakenBatch((), counts, 0), LEARNER_METRICS, STEP_TIMES, canary_error=0.0
    )
    for metrics in (values, *values_by_environment.values()):
        assert TrainMetric.REWARD_MEAN not in metrics
        assert TrainMetric.WIN_RATE not in metrics
        assert TrainMetric.STALENESS_MEAN not in metrics
    assert "reward_term.format" not in values_by_environment["catch"]
    assert values[TrainMetric.NUM_EPISODES_LOST] == 2


def test_optional_metrics_are_omitted_if_not_measured() -> None:
    values = compute_step_values(MIXED_BATCH, LEARNER_METRICS, STEP_TIMES, canary_error=0.0)[0]
    absent_metrics = {TrainMetric.VALUE_LOSS, TrainMetric.EXPLAINED_VARIANCE, TrainMetric.MFU}
    assert not absent_metrics & values.keys()
    complete_metrics = dataclasses.replace(
        LEARNER_METRICS, value_loss=0.5, explained_variance=0.25, flops=3e9, peak_flops=12e9
    )
    values = compute_step_values(MIXED_BATCH, complete_metrics, STEP_TIMES, canary_error=0.0)[0]
    assert values[TrainMetric.VALUE_LOSS] == 0.5
    assert values[TrainMetric.EXPLAINED_VARIANCE] == 0.25
    # The step computes 3 GFLOP in one second. The peak is 12 GFLOP per second.
    assert values[TrainMetric.MFU] == pytest.approx(0.25)


def test_nonfinite_metrics_are_omitted() -> None:
    skipped_metrics = dataclasses.replace(
        LEARNER_METRICS, loss=math.nan, entropy=math.inf, grad_norm=None, num_skipped_updates=1
    )
    values = compute_step_values(MIXED_BATCH, skipped_metrics, STEP_TIMES, canary_error=0.0)[0]
    absent_metrics = {TrainMetric.LOSS, TrainMetric.ENTROPY, TrainMetric.GRAD_NORM}
    assert not absent_metrics & values.keys()
    assert values[TrainMetric.NUM_SKIPPED_UPDATES] == 1
    assert values[TrainMetric.LEARNING_RATE] == 1e-3
