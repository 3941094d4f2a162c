"""Tests of the evaluator: seeds, retries, void episodes and baselines."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ludus.env.evaluation import EpisodeOutcome, summarize
from ludus.env.types import JsonObject, StepResult, TaskSet
from ludus.proto.config import EvalConfig, LocalEnvironment
from ludus.proto.errors import EpisodesFailedError, SessionLostError
from ludus.proto.runs import Transcript
from ludus.trainer.driver.evaluation import (
    Evaluator,
    find_max_games,
    list_eval_seeds,
    play_baselines,
)
from tests.report.synthetic_run import transcript
from tests.report.test_evaluation import CoinClient, guess

FIRST_SEED = 2**31
CONFIG = EvalConfig(num_games=8, num_games_during=4, seed=FIRST_SEED, temperature=0.5)
ENVIRONMENTS = {
    "blackjack": LocalEnvironment(
        policies="openspiel_env.policies:fixed_policies",
        baselines=("random", "best"),
        random_policy="random",
        optimal_policy="best",
    ),
    "catch": LocalEnvironment(),
}


def make_outcomes(seeds: Sequence[int], value: float | None) -> list[EpisodeOutcome]:
    return [EpisodeOutcome(seed, value, 1, success=False) for seed in seeds]


class FakeWorkers:
    """Fake workers that win every second episode of blackjack and draw every episode of catch.

    In each of the first `num_calls_with_losses` calls, all episodes after the first are lost.
    """

    def __init__(self, num_calls_with_losses: int = 0) -> None:
        self.calls: list[tuple[str, tuple[int, ...], float]] = []
        self._num_calls_with_losses = num_calls_with_losses

    async def evaluate(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        self.calls.append((environment, tuple(seeds), temperature))
        if environment == "catch":
            return make_outcomes(seeds, 0.0)
        outcomes = [EpisodeOutcome(seed, seed % 2, 1, success=seed % 2 == 1) for seed in seeds]
        if len(self.calls) <= self._num_calls_with_losses:
            outcomes[1:] = make_outcomes(seeds[1:], None)
        return outcomes


class SamplingWorkers(FakeWorkers):
    """Fake workers that play samples of blackjack, and fail to play samples of catch."""

    async def play_samples(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[Transcript]:
        self.calls.append((environment, tuple(seeds), temperature))
        if environment == "catch":
            raise SessionLostError("no server")
        sample = transcript(0, environment=environment)
        return [sample.model_copy(update={"seed": seed}) for seed in seeds]


def make_evaluator(workers: FakeWorkers) -> Evaluator:
    seeds = list_eval_seeds(CONFIG, 8)
    baselines = {
        "blackjack": {"random": make_outcomes(seeds, 0.0), "best": make_outcomes(seeds, 2.0)}
    }
    return Evaluator(CONFIG, ENVIRONMENTS, workers, baselines)


async def test_every_environment_is_evaluated_on_the_same_seeds() -> None:
    workers = FakeWorkers()
    reports = await make_evaluator(workers).evaluate(4)
    seeds = tuple(range(FIRST_SEED, FIRST_SEED + 4))
    assert workers.calls == [("blackjack", seeds, 0.5), ("catch", seeds, 0.5)]
    blackjack, catch = reports["blackjack"], reports["catch"]
    assert blackjack.policy.win_rate == 0.5
    assert blackjack.gap_closed == pytest.approx(0.25)
    assert {result.num_games for result in blackjack.baselines.values()} == {4}
    assert (catch.policy.draw_rate, catch.gap_closed, catch.baselines) == (1.0, None, {})


async def test_report_says_whether_the_environment_is_a_game() -> None:
    evaluator = replace(make_evaluator(FakeWorkers()), games=frozenset({"blackjack"}))
    reports = await evaluator.evaluate(4)
    assert {name: report.is_game for name, report in reports.items()} == {
        "blackjack": True,
        "catch": False,
    }


async def test_lost_episodes_are_retried() -> None:
    workers = FakeWorkers(num_calls_with_losses=1)
    reports = await make_evaluator(workers).evaluate(4)
    assert reports["blackjack"].policy.num_games == 4
    assert [call[:2] for call in workers.calls] == [
        ("blackjack", tuple(range(FIRST_SEED, FIRST_SEED + 4))),
        ("blackjack", tuple(range(FIRST_SEED + 1, FIRST_SEED + 4))),
        ("catch", tuple(range(FIRST_SEED, FIRST_SEED + 4))),
    ]


async def test_fixed_policies_use_the_turn_limit_of_the_trained_policy() -> None:
    outcomes = await play_baselines(CoinClient(), {"guess": guess}, ("guess",), CONFIG, max_turns=1)
    assert [outcome.num_steps for outcome in outcomes["guess"]] == [1] * 8


class LosingClient(CoinClient):
    """A client whose first sessions of each seed are lost."""

    def __init__(self, num_losses: int, losing_seeds: tuple[int, ...]) -> None:
        super().__init__()
        self._num_losses, self._losing_seeds = num_losses, losing_seeds
        self.opened_seeds: Counter[int] = Counter()

    async def open(self, *, seed: int | None = None, **options: Any) -> tuple[Any, StepResult]:
        assert seed is not None
        self.opened_seeds[seed] += 1
        if seed in self._losing_seeds and self.opened_seeds[seed] <= self._num_losses:
            raise SessionLostError("gone")
        return await super().open(seed=seed, **options)


@pytest.mark.parametrize(("num_losses", "num_games"), [(1, 8), (2, 8), (99, 5)])
async def test_lost_episodes_of_fixed_policies_are_retried(
    num_losses: int, num_games: int, caplog: pytest.LogCaptureFixture
) -> None:
    lost_seeds = (FIRST_SEED, FIRST_SEED + 3, FIRST_SEED + 7)
    client = LosingClient(num_losses, lost_seeds)
    outcomes = await play_baselines(client, {"guess": guess}, ("guess",), CONFIG, max_turns=9)
    assert [outcome.seed for outcome in outcomes["guess"]] == list_eval_seeds(CONFIG, 8)
    result = summarize(outcomes["guess"])
    assert (result.num_games, result.num_void) == (num_games, 8 - num_games)
    assert {client.opened_seeds[seed] for seed in lost_seeds} == {min(num_losses + 1, 3)}
    assert client.opened_seeds[FIRST_SEED + 1] == 1
    assert ("3 of 8 episodes of the fixed policy 'guess' are void" in caplog.text) is (
        num_games < 8
    )


async def test_fixed_policy_without_valid_episodes_is_reported_with_the_reason() -> None:
    def fail(observation: JsonObject, rng: random.Random) -> JsonObject:
        raise KeyError("hand")

    with pytest.raises(EpisodesFailedError, match=r"fixed policy 'best'.*KeyError: 'hand'"):
        await play_baselines(CoinClient(), {"best": fail}, ("best",), CONFIG, max_turns=1)


@pytest.mark.parametrize(
    ("temperature", "max_games_per_task", "num_played"),
    [(0.0, 2, 3), (0.0, None, 3), (0.5, 2, 6), (0.5, 4, 8), (0.5, None, 8)],
)
async def test_an_evaluation_has_few_episodes_of_each_task(
    temperature: float,
    max_games_per_task: int | None,
    num_played: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    changes = {"temperature": temperature, "max_games_per_task": max_games_per_task}
    workers, config = FakeWorkers(), CONFIG.model_copy(update=changes)
    tasks = TaskSet(num_tasks=10, num_test_tasks=3)
    max_games = find_max_games(config, tasks, has_agent=False)
    limits = {} if max_games is None else {"catch": max_games}
    evaluator = Evaluator(config, ENVIRONMENTS, workers, {}, limits)
    reports = await evaluator.evaluate(8)
    assert [len(seeds) for _, seeds, _ in workers.calls] == [8, num_played]
    assert reports["blackjack"].num_games_requested is None
    assert reports["catch"].policy.num_games == num_played
    assert reports["catch"].num_games_requested == (8 if num_played < 8 else None)
    assert (f"{num_played} episodes, not 8" in caplog.text) is (num_played < 8)


async def test_gap_is_closed_on_tasks_that_a_policy_played_less_often() -> None:
    tasks = TaskSet(num_tasks=10, num_test_tasks=3)
    config = CONFIG.model_copy(update={"temperature": 0.0})
    seeds = list_eval_seeds(config, 8)
    baselines = {
        "blackjack": {
            name: [
                EpisodeOutcome(seed, value, 1, task_seed=tasks.find_first_seed(seed))
                for seed in seeds
            ]
            for name, value in (("random", 0.0), ("best", 2.0))
        }
    }
    evaluator = Evaluator(config, ENVIRONMENTS, FakeWorkers(), baselines, {"blackjack": 3})
    report = (await evaluator.evaluate(8))["blackjack"]
    # The policy wins 1 in one of three tasks, and the best policy wins 2 in each.
    assert report.gap_closed == pytest.approx(1 / 6)
    assert report.baselines["best"].num_tasks == 3


async def test_fixed_policies_play_few_episodes_of_each_task() -> None:
    tasks = TaskSet(num_tasks=10, num_test_tasks=3)
    config = CONFIG.model_copy(update={"max_games_per_task": 2, "temperature": 0.0})
    outcomes = await play_baselines(
        CoinClient(), {"guess": guess}, ("guess",), config, max_turns=9, tasks=tasks
    )
    assert [outcome.seed for outcome in outcomes["guess"]] == list_eval_seeds(CONFIG, 6)


def test_the_episodes_of_an_agent_differ_at_temperature_zero() -> None:
    config = CONFIG.model_copy(update={"temperature": 0.0})
    tasks = TaskSet(num_tasks=10, num_test_tasks=3)
    assert find_max_games(config, tasks, has_agent=True) == 12
    assert find_max_games(config, TaskSet(num_tasks=10), has_agent=False) == 10
    assert find_max_games(config, None, has_agent=False) is None


class FailingWorkers(FakeWorkers):
    """Fake workers that fail in every episode of catch, or only in the second episode."""

    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self._num_failures = num_failures

    async def evaluate(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        outcomes = make_outcomes(seeds, 1.0)
        if environment == "catch":
            for index, seed in enumerate(seeds):
                if seed == FIRST_SEED + 1 or self._num_failures > 1:
                    reason = "KeyError: 'ball'" if seed != FIRST_SEED else "SessionLostError: gone"
                    outcomes[index] = EpisodeOutcome(seed, None, 1, failure=reason)
        return outcomes


async def test_most_common_reason_is_reported_if_all_episodes_are_void() -> None:
    with pytest.raises(
        EpisodesFailedError, match=r"all 4 episodes .* in 'catch'.*KeyError: 'ball'"
    ):
        await make_evaluator(FailingWorkers(num_failures=4)).evaluate(4)


async def test_repeatedly_failing_episode_is_counted_and_excluded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports = await make_evaluator(FailingWorkers(num_failures=1)).evaluate(4)
    policy = reports["catch"].policy
    assert (policy.num_games, policy.num_void) == (3, 1)
    assert "1 of 4 episodes" in caplog.text
    assert "KeyError: 'ball'" in caplog.text


async def test_failed_episodes_of_a_fixed_policy_are_excluded_from_the_gap() -> None:
    seeds = list_eval_seeds(CONFIG, 8)
    failures = [EpisodeOutcome(seed, None, 1, failure="KeyError: 'ace'") for seed in seeds[:4]]
    best_outcomes = [*failures, *make_outcomes(seeds[4:], 2.0)]
    baselines = {"blackjack": {"random": make_outcomes(seeds, 0.0), "best": best_outcomes}}
    evaluator = Evaluator(CONFIG, ENVIRONMENTS, FakeWorkers(), baselines)
    early_report = (await evaluator.evaluate(4))["blackjack"]
    assert list(early_report.baselines) == ["random"]
    assert early_report.gap_closed is None
    final_report = (await evaluator.evaluate(8))["blackjack"]
    assert final_report.baselines["best"].num_void == 4
    assert final_report.gap_closed == pytest.approx(0.25)


async def test_samples_are_the_first_evaluation_episodes_and_no_failure_stops_a_run() -> None:
    workers = SamplingWorkers()
    samples = await make_evaluator(workers).play_samples()
    assert workers.calls == [
        (name, tuple(range(FIRST_SEED, FIRST_SEED + 8)), 0.5) for name in ENVIRONMENTS
    ]
    assert [(sample.environment, sample.seed) for sample in samples] == [
        ("blackjack", FIRST_SEED + index) for index in range(8)
    ]
