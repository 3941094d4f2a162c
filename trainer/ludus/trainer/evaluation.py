"""Judges the policy on deals that training never sees, beside fixed policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ludus.env.client import AsyncEnvClient
from ludus.env.evaluation import EpisodeOutcome, FixedPolicy, gap_closed, play_policy, summarise
from ludus.proto.config import EnvironmentConfig, EvalConfig
from ludus.proto.errors import UnavailableError
from ludus.proto.runs import EvalReport

_MAX_ATTEMPTS = 3


class PlaysGames(Protocol):
    """What plays the policy: the rollout workers."""

    async def evaluate(self, seeds: Sequence[int], temperature: float) -> list[EpisodeOutcome]: ...


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The policy's judge; all policies play the same deals."""

    config: EvalConfig
    environment: EnvironmentConfig
    workers: PlaysGames
    baselines: Mapping[str, Sequence[EpisodeOutcome]]
    """Outcomes of the fixed policies on the first `num_games` deals, in their order."""

    async def judge(self, num_games: int) -> EvalReport:
        """The policy on the first `num_games` deals, and the fixed policies on the same."""
        seeds = eval_seeds(self.config, num_games)
        outcomes = await self._play(seeds)
        if all(outcome.episode_return is None for outcome in outcomes):
            raise UnavailableError(
                f"all {num_games} games of the evaluation were lost: the environment server was "
                "away for longer than environment.reconnect_timeout_s; see that it stays up"
            )
        same = {name: played[:num_games] for name, played in self.baselines.items()}
        closed = self._gap_closed(outcomes, same)
        return EvalReport(
            policy=summarise(outcomes),
            baselines={name: summarise(played) for name, played in same.items()},
            temperature=self.config.temperature,
            gap_closed=closed[0] if closed else None,
            gap_closed_ci95=closed[1] if closed else None,
        )

    async def _play(self, seeds: Sequence[int]) -> list[EpisodeOutcome]:
        """One outcome per seed; games that infrastructure ended are played again."""
        played: dict[int, EpisodeOutcome] = {}
        missing = list(seeds)
        for _ in range(_MAX_ATTEMPTS):
            outcomes = await self.workers.evaluate(missing, self.config.temperature)
            played |= {outcome.seed: outcome for outcome in outcomes}
            missing = [seed for seed in seeds if played[seed].episode_return is None]
            if not missing:
                break
        return [played[seed] for seed in seeds]

    def _gap_closed(
        self, outcomes: Sequence[EpisodeOutcome], baselines: Mapping[str, Sequence[EpisodeOutcome]]
    ) -> tuple[float, tuple[float, float]] | None:
        worst, best = self.environment.random_policy, self.environment.optimal_policy
        if worst is None or best is None:
            return None
        return gap_closed(outcomes, baselines[worst], baselines[best])


async def play_baselines(
    client: AsyncEnvClient,
    policies: Mapping[str, FixedPolicy],
    baselines: Sequence[str],
    config: EvalConfig,
) -> dict[str, list[EpisodeOutcome]]:
    """The outcomes of the fixed policies `baselines` on all evaluation deals."""
    seeds = eval_seeds(config, max(config.num_games, config.num_games_during))
    return {name: await play_policy(client, policies[name], seeds) for name in baselines}


def eval_seeds(config: EvalConfig, num_games: int) -> list[int]:
    """The seeds of the first `num_games` evaluation deals."""
    return list(range(config.seed, config.seed + num_games))
