"""Tests of intervals over tasks that are played repeatedly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ludus.env.evaluation import (
    EpisodeOutcome,
    clustered_wilson_interval,
    compute_mean_interval,
    measure_difference,
    measure_gap_closed,
    measure_win_difference,
    play_policy,
    summarize,
    t_quantile,
    wilson_interval,
)
from ludus.env.types import StepResult, TaskSet
from ludus.proto.runs import PolicyResult
from ludus.proto.seeds import FIRST_EVAL_SEED
from tests.report.test_evaluation import CoinClient, CoinSession, guess

NUM_TASKS, NUM_REPEATS, NUM_EVALUATIONS = 40, 10, 2_000
TASKS = np.repeat(np.arange(NUM_TASKS), NUM_REPEATS)


@pytest.mark.parametrize(
    ("degrees_of_freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (10, 2.2281), (39, 2.0227)],
)
def test_quantiles_match_the_table_of_student(degrees_of_freedom: int, quantile: float) -> None:
    assert t_quantile(degrees_of_freedom) == pytest.approx(quantile, rel=0.002)


def make_outcomes(returns: list[float], num_tasks: int) -> list[EpisodeOutcome]:
    """Return outcomes of tasks that are played in turn; a positive return is a success."""
    return [
        EpisodeOutcome(seed, value, 1, success=value > 0, task_seed=seed % num_tasks)
        for seed, value in enumerate(returns)
    ]


def test_equal_games_of_a_task_count_once() -> None:
    returns = [1.0, 0.0, 1.0, 1.0, 0.0] * 2
    greedy, played_once = (
        summarize(make_outcomes(returns * 10, 10)),
        summarize(make_outcomes(returns, 10)),
    )
    assert (greedy.num_games, greedy.num_tasks) == (100, 10)
    assert greedy.win_rate_ci95 is not None and played_once.win_rate_ci95 is not None
    widths = [high - low for low, high in (greedy.win_rate_ci95, played_once.win_rate_ci95)]
    assert widths[0] >= 0.95 * widths[1]
    assert greedy.expected_return_ci95 == pytest.approx(played_once.expected_return_ci95)


def test_intervals_of_different_tasks_are_those_of_independent_games() -> None:
    result = summarize(make_outcomes([1.0, 0.0, 0.0, 1.0, 1.0], 5))
    assert result.win_rate_ci95 == wilson_interval(3, 5)
    assert result.expected_return_ci95 == compute_mean_interval([1.0, 0.0, 0.0, 1.0, 1.0])


def test_all_games_won_is_evidence_about_the_tasks_only() -> None:
    result = summarize(make_outcomes([1.0] * 400, 40))
    assert result.win_rate_ci95 == wilson_interval(40, 40)
    single = summarize(make_outcomes([1.0, 0.0] * 50, 1))
    assert single.win_rate_ci95 == wilson_interval(0.5, 1)


def test_gap_interval_is_over_tasks() -> None:
    generator = np.random.default_rng(0)
    policy, optimal = generator.uniform(0, 1, 8).tolist(), generator.uniform(2, 3, 8).tolist()
    single = [make_outcomes(returns, 8) for returns in (policy, [0.0] * 8, optimal)]
    repeated = [make_outcomes(returns * 10, 8) for returns in (policy, [0.0] * 8, optimal)]
    expected, result = measure_gap_closed(*single), measure_gap_closed(*repeated)
    assert expected is not None and result is not None
    assert result[0] == pytest.approx(expected[0])
    assert result[1] == pytest.approx(expected[1])


def test_differences_are_paired_by_task() -> None:
    generator = np.random.default_rng(0)
    second_returns = generator.uniform(0, 1, 8).tolist()
    first_returns = [value + 0.5 for value in second_returns]
    first, second = make_outcomes(first_returns * 2, 8), make_outcomes(second_returns * 2, 8)
    result = measure_difference(first, second)
    assert result is not None
    mean, interval, num_tasks = result
    # The tasks differ widely, but the differences are equal.
    assert (mean, *interval) == pytest.approx((0.5, 0.5, 0.5))
    assert num_tasks == 8
    # Episodes of other tasks, and void episodes, are not compared.
    assert measure_difference(first[:8], second[3:6] + make_outcomes([1.0] * 20, 20)[10:]) == (
        pytest.approx(0.5),
        pytest.approx((0.5, 0.5)),
        3,
    )
    assert measure_difference(first[:2], second[4:6]) is None


def test_differences_of_wins_need_reported_success() -> None:
    wins, losses = make_outcomes([1.0] * 4, 4), make_outcomes([0.0, 1.0, 0.0, 1.0], 4)
    result = measure_win_difference(wins, losses)
    assert result is not None and result[0] == 0.5
    assert result[1] == compute_mean_interval([1.0, 0.0, 1.0, 0.0])
    unreported = [replace(outcome, success=None) for outcome in wins]
    assert measure_win_difference(unreported, losses) is None


class TaskClient(CoinClient):
    """A client that records the seeds of its sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int] = []

    async def open(
        self, *, seed: int | None = None, close_when_done: bool = False, wait_s: float = 0.0
    ) -> tuple[CoinSession, StepResult]:
        assert seed is not None
        self.seeds.append(seed)
        return await super().open(seed=seed, close_when_done=close_when_done, wait_s=wait_s)


@pytest.mark.parametrize(
    ("first_seed", "tasks", "num_different"),
    [
        (0, TaskSet(4, 7), 4),
        (6, TaskSet(4, 7), 4),
        (FIRST_EVAL_SEED, TaskSet(4, 7), 7),
        (FIRST_EVAL_SEED + 3, TaskSet(4, 7), 7),
        (FIRST_EVAL_SEED + 3, TaskSet(4, 0), 4),
        (FIRST_EVAL_SEED, TaskSet(0, 0), 20),
        (FIRST_EVAL_SEED, None, 20),
    ],
)
def test_seeds_beyond_the_number_of_tasks_repeat_tasks(
    first_seed: int, tasks: TaskSet | None, num_different: int
) -> None:
    client, seeds = TaskClient(), range(first_seed, first_seed + 20)
    outcomes = asyncio.run(play_policy(client, guess, seeds, tasks=tasks, num_concurrent=1))
    assert [outcome.seed for outcome in outcomes] == list(seeds)
    assert [outcome.task for outcome in outcomes] == client.seeds
    assert len(set(client.seeds)) == len(set(client.seeds[:num_different])) == num_different
    assert summarize(outcomes).num_tasks == num_different
    # The random numbers of the player differ between games of a task.
    returns_by_task: dict[int, set[float | None]] = {}
    for outcome in outcomes:
        returns_by_task.setdefault(outcome.task, set()).add(outcome.episode_return)
    if num_different < 20:
        assert max(map(len, returns_by_task.values())) > 1


def play_sampled(generator: np.random.Generator, rates: np.ndarray) -> np.ndarray:
    return generator.random(len(TASKS)) < rates[TASKS]


def play_greedily(generator: np.random.Generator, rates: np.ndarray) -> np.ndarray:
    return (generator.random(NUM_TASKS) < rates)[TASKS]


@pytest.mark.slow
@pytest.mark.parametrize("play", [play_sampled, play_greedily])
@pytest.mark.parametrize("rate_distribution", [(2.0, 2.0), (0.5, 0.5), (1.0, 3.0)])
def test_intervals_of_repeated_tasks_have_95_percent_coverage(
    play: Callable[[np.random.Generator, np.ndarray], np.ndarray],
    rate_distribution: tuple[float, float],
) -> None:
    """The true rate is the mean over the population of tasks, each with its own success rate."""
    generator = np.random.default_rng(1)
    alpha, beta = rate_distribution
    true_rate = alpha / (alpha + beta)
    num_covered = np.zeros(3)
    for _ in range(NUM_EVALUATIONS):
        wins = play(generator, generator.beta(alpha, beta, NUM_TASKS))
        intervals = (
            clustered_wilson_interval(wins, TASKS),
            compute_mean_interval(wins, TASKS),
            wilson_interval(int(wins.sum()), len(wins)),
        )
        num_covered += [low <= true_rate <= high for low, high in intervals]
    proportion_coverage, mean_coverage, independent_coverage = num_covered / NUM_EVALUATIONS
    assert 0.93 <= proportion_coverage <= 0.97
    assert 0.93 <= mean_coverage <= 0.97
    # Games of a task are not independent.
    assert independent_coverage < 0.9


def test_results_of_earlier_versions_have_no_number_of_tasks() -> None:
    result = summarize(make_outcomes([1.0, 0.0], 2)).model_dump(exclude={"num_tasks"})
    assert PolicyResult.model_validate(result).num_tasks is None
