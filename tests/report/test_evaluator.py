from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ludus.env.evaluation import EpisodeOutcome
from ludus.env.types import JsonObject
from ludus.proto.config import EvalConfig, LocalEnvironment
from ludus.proto.errors import EpisodesFailedError
from ludus.trainer.driver.evaluation import Evaluator, list_eval_seeds, play_baselines
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


def outcomes(seeds: Sequence[int], value: float | None) -> list[EpisodeOutcome]:
    return [EpisodeOutcome(seed, value, 1, success=False) for seed in seeds]


class Workers:
    """Fake workers that win every second deal of blackjack and draw at catch.

    The first `num_losing_calls` calls lose some games.
    """

    def __init__(self, num_losing_calls: int = 0) -> None:
        self.calls: list[tuple[str, tuple[int, ...], float]] = []
        self._num_losing_calls = num_losing_calls

    async def evaluate(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        self.calls.append((environment, tuple(seeds), temperature))
        if environment == "catch":
            return outcomes(seeds, 0.0)
        played = [EpisodeOutcome(seed, seed % 2, 1, success=seed % 2 == 1) for seed in seeds]
        if len(self.calls) <= self._num_losing_calls:
            played[1:] = outcomes(seeds[1:], None)
        return played


def evaluator(workers: Workers) -> Evaluator:
    seeds = list_eval_seeds(CONFIG, 8)
    baselines = {"blackjack": {"random": outcomes(seeds, 0.0), "best": outcomes(seeds, 2.0)}}
    return Evaluator(CONFIG, ENVIRONMENTS, workers, baselines)


async def test_every_environment_is_evaluated_on_the_same_seeds() -> None:
    workers = Workers()
    reports = await evaluator(workers).evaluate(4)
    deals = tuple(range(FIRST_SEED, FIRST_SEED + 4))
    assert workers.calls == [("blackjack", deals, 0.5), ("catch", deals, 0.5)]
    blackjack, catch = reports["blackjack"], reports["catch"]
    assert blackjack.policy.win_rate == 0.5
    assert blackjack.gap_closed == pytest.approx(0.25)
    assert {r.num_games for r in blackjack.baselines.values()} == {4}
    assert (catch.policy.draw_rate, catch.gap_closed, catch.baselines) == (1.0, None, {})


async def test_lost_games_are_played_again() -> None:
    workers = Workers(num_losing_calls=1)
    reports = await evaluator(workers).evaluate(4)
    assert reports["blackjack"].policy.num_games == 4
    assert [call[:2] for call in workers.calls] == [
        ("blackjack", tuple(range(FIRST_SEED, FIRST_SEED + 4))),
        ("blackjack", tuple(range(FIRST_SEED + 1, FIRST_SEED + 4))),
        ("catch", tuple(range(FIRST_SEED, FIRST_SEED + 4))),
    ]


async def test_fixed_policies_have_the_turn_limit_of_the_trained_policy() -> None:
    played = await play_baselines(CoinClient(), {"guess": guess}, ("guess",), CONFIG, max_turns=1)
    assert [outcome.num_steps for outcome in played["guess"]] == [1] * 8


async def test_a_fixed_policy_without_valid_games_is_named_with_the_reason() -> None:
    def fails(observation: JsonObject, rng: random.Random) -> JsonObject:
        raise KeyError("hand")

    with pytest.raises(EpisodesFailedError, match=r"fixed policy 'best'.*KeyError: 'hand'"):
        await play_baselines(CoinClient(), {"best": fails}, ("best",), CONFIG, max_turns=1)


class Failing(Workers):
    """Fake workers that fail in all games of catch, or only in the second."""

    def __init__(self, num_failing: int) -> None:
        super().__init__()
        self._num_failing = num_failing

    async def evaluate(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        played = outcomes(seeds, 1.0)
        if environment == "catch":
            for index, seed in enumerate(seeds):
                if seed == FIRST_SEED + 1 or self._num_failing > 1:
                    reason = "KeyError: 'ball'" if seed != FIRST_SEED else "SessionLostError: gone"
                    played[index] = EpisodeOutcome(seed, None, 1, failure=reason)
        return played


async def test_if_all_games_are_void_the_most_common_reason_is_named() -> None:
    with pytest.raises(
        EpisodesFailedError, match=r"all 4 episodes .* in 'catch'.*KeyError: 'ball'"
    ):
        await evaluator(Failing(num_failing=4)).evaluate(4)


async def test_a_game_that_fails_each_time_is_counted_and_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports = await evaluator(Failing(num_failing=1)).evaluate(4)
    policy = reports["catch"].policy
    assert (policy.num_games, policy.num_void) == (3, 1)
    assert "1 of 4 episodes" in caplog.text
    assert "KeyError: 'ball'" in caplog.text


async def test_games_of_a_fixed_policy_that_failed_are_left_out_of_the_comparison() -> None:
    seeds = list_eval_seeds(CONFIG, 8)
    failed = [EpisodeOutcome(seed, None, 1, failure="KeyError: 'ace'") for seed in seeds[:4]]
    best = [*failed, *outcomes(seeds[4:], 2.0)]
    baselines = {"blackjack": {"random": outcomes(seeds, 0.0), "best": best}}
    judge = Evaluator(CONFIG, ENVIRONMENTS, Workers(), baselines)
    during = (await judge.evaluate(4))["blackjack"]
    assert list(during.baselines) == ["random"]
    assert during.gap_closed is None
    at_the_end = (await judge.evaluate(8))["blackjack"]
    assert at_the_end.baselines["best"].num_void == 4
    assert at_the_end.gap_closed == pytest.approx(0.25)
