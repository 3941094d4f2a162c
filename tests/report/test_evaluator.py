from __future__ import annotations

from collections.abc import Sequence

import pytest

from ludus.env.evaluation import EpisodeOutcome
from ludus.proto.config import EvalConfig, LocalEnvironment
from ludus.proto.errors import UnavailableError
from ludus.trainer.evaluation import Evaluator, eval_seeds

CONFIG = EvalConfig(num_games=8, num_games_during=4, seed=100, temperature=0.5)
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
    return [EpisodeOutcome(seed, value, 1) for seed in seeds]


class Workers:
    """Wins every second deal of blackjack and draws catch; loses some games at first."""

    def __init__(self, num_losing_calls: int = 0) -> None:
        self.calls: list[tuple[str, tuple[int, ...], float]] = []
        self._num_losing_calls = num_losing_calls

    async def evaluate(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        self.calls.append((environment, tuple(seeds), temperature))
        if environment == "catch":
            return outcomes(seeds, 0.0)
        played = [EpisodeOutcome(seed, float(seed % 2), 1) for seed in seeds]
        if len(self.calls) <= self._num_losing_calls:
            played[1:] = outcomes(seeds[1:], None)
        return played


def evaluator(workers: Workers) -> Evaluator:
    seeds = eval_seeds(CONFIG, 8)
    baselines = {"blackjack": {"random": outcomes(seeds, 0.0), "best": outcomes(seeds, 2.0)}}
    return Evaluator(CONFIG, ENVIRONMENTS, workers, baselines)


async def test_every_environment_is_judged_on_the_same_seeds_beside_its_own_policies() -> None:
    workers = Workers()
    reports = await evaluator(workers).judge(4)
    deals = (100, 101, 102, 103)
    assert workers.calls == [("blackjack", deals, 0.5), ("catch", deals, 0.5)]
    blackjack, catch = reports["blackjack"], reports["catch"]
    assert blackjack.policy.win_rate == 0.5
    assert blackjack.gap_closed == pytest.approx(0.25)
    assert {r.num_games for r in blackjack.baselines.values()} == {4}
    assert (catch.policy.draw_rate, catch.gap_closed, catch.baselines) == (1.0, None, {})


async def test_games_that_infrastructure_ended_are_played_again_where_they_were_lost() -> None:
    workers = Workers(num_losing_calls=1)
    reports = await evaluator(workers).judge(4)
    assert reports["blackjack"].policy.num_games == 4
    assert [call[:2] for call in workers.calls] == [
        ("blackjack", (100, 101, 102, 103)),
        ("blackjack", (101, 102, 103)),
        ("catch", (100, 101, 102, 103)),
    ]


async def test_an_environment_that_stays_away_is_named() -> None:
    class Away(Workers):
        async def evaluate(
            self, environment: str, seeds: Sequence[int], temperature: float
        ) -> list[EpisodeOutcome]:
            return outcomes(seeds, None if environment == "catch" else 1.0)

    with pytest.raises(UnavailableError, match="all 4 games of the evaluation in 'catch'"):
        await evaluator(Away()).judge(4)
