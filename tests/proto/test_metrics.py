"""Tests of metrics: combination and Prometheus names."""

from __future__ import annotations

import random
import re
import statistics

import pytest

from ludus.proto.metrics import (
    REWARD_TERM_PREFIX,
    EvalMetric,
    Reduction,
    TrainMetric,
    combine_metric,
    combine_metrics,
    prometheus_name,
)

ALL_METRICS = [*TrainMetric, *EvalMetric]


def make_reward_metrics(rewards: list[float]) -> dict[str, float]:
    """Return the reward metrics of one part of a batch."""
    return {
        TrainMetric.NUM_EPISODES_SCORED: len(rewards),
        TrainMetric.REWARD_MEAN: statistics.fmean(rewards),
        TrainMetric.REWARD_STD: statistics.pstdev(rewards),
    }


def test_combined_deviation_equals_deviation_of_all_episodes() -> None:
    rng = random.Random(0)
    parts = [[rng.gauss(shift, 1 + shift) for _ in range(n)] for shift, n in ((0, 3), (5, 50))]
    combined_metrics = combine_metrics(make_reward_metrics(part) for part in parts)
    assert combined_metrics == pytest.approx(make_reward_metrics(parts[0] + parts[1]))


def test_combination_is_associative() -> None:
    rng = random.Random(1)
    parts = [make_reward_metrics([rng.random() for _ in range(n)]) for n in (1, 7, 20, 4)]
    nested_result = combine_metrics([combine_metrics(parts[:2]), combine_metrics(parts[2:])])
    assert nested_result == pytest.approx(combine_metrics(parts))


def test_each_metric_uses_its_reduction() -> None:
    early_metrics = {
        TrainMetric.NUM_WINS: 3,
        TrainMetric.STALENESS_MAX: 2,
        TrainMetric.LEARNING_RATE: 0.5,
        TrainMetric.ENTROPY: 1.0,
        TrainMetric.NUM_TOKENS_TRAINED: 10,
        REWARD_TERM_PREFIX + "format": 1.0,
    }
    late_metrics = {
        TrainMetric.NUM_WINS: 4,
        TrainMetric.STALENESS_MAX: 1,
        TrainMetric.LEARNING_RATE: 0.25,
        TrainMetric.ENTROPY: 0.0,
        TrainMetric.NUM_TOKENS_TRAINED: 30,
        REWARD_TERM_PREFIX + "format": 0.0,
    }
    assert combine_metrics([early_metrics, late_metrics]) == {
        TrainMetric.NUM_WINS: 7,
        TrainMetric.STALENESS_MAX: 2,
        TrainMetric.LEARNING_RATE: 0.25,
        TrainMetric.ENTROPY: 0.25,
        TrainMetric.NUM_TOKENS_TRAINED: 40,
        REWARD_TERM_PREFIX + "format": 0.5,
    }


def test_parts_without_a_metric_are_skipped() -> None:
    empty_part = {TrainMetric.NUM_EPISODES_SCORED: 0}
    full_part = make_reward_metrics([1.0, 0.0])
    assert combine_metrics([empty_part, full_part]) == pytest.approx(full_part)
    assert combine_metrics([empty_part, empty_part]) == {TrainMetric.NUM_EPISODES_SCORED: 0}
    assert combine_metrics([]) == {}
    assert combine_metric(TrainMetric.LOSS, [empty_part]) is None


def test_evaluation_means_are_weighted_by_num_games() -> None:
    small_part, large_part = ({"win_rate": 1.0, "num_games": 1}, {"win_rate": 0.0, "num_games": 3})
    assert combine_metric(EvalMetric.WIN_RATE, [small_part, large_part]) == 0.25


@pytest.mark.parametrize("metric", ALL_METRICS, ids=str)
def test_every_metric_has_help_text_and_is_weighted_by_a_sum(
    metric: TrainMetric | EvalMetric,
) -> None:
    spec, metric_type = metric.spec, type(metric)
    assert spec.help.endswith(".")
    assert (spec.center is not None) == (spec.reduction is Reduction.DEVIATION)
    for related_metric in (spec.weight, spec.center):
        if related_metric is not None:
            # A per-environment metric needs a per-environment weight.
            related_spec = metric_type(related_metric).spec  # type: ignore[call-arg]
            assert related_spec.is_per_environment or not spec.is_per_environment
    if spec.weight is not None:
        assert metric_type(spec.weight).spec.reduction is Reduction.SUM  # type: ignore[call-arg]


def test_dashboard_names_follow_prometheus_conventions() -> None:
    names = [prometheus_name(metric) for metric in ALL_METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"ludus_train_[a-z0-9_]+", name) for name in names)
    assert not [name for name in names if re.search(r"_(s|ms|num|total|count)$|num_", name)]
    assert prometheus_name(TrainMetric.TRAIN_S) == "ludus_train_train_seconds"
    assert prometheus_name(EvalMetric.WIN_RATE) == "ludus_train_eval_win_rate"
