"""Judges the policy on games that training never sees, beside fixed policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ludus.env.client import AsyncEnvClient
from ludus.env.evaluation import EpisodeOutcome, FixedPolicy, gap_closed, play_policy, summarise
from ludus.proto.config import EnvironmentConfig, EvalConfig
from ludus.proto.errors import UnavailableError
from ludus.proto.runs import EvalReport
from ludus.trainer.processes import Workers

_MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The policy's judge; in an environment all policies play from the same seeds."""

    config: EvalConfig
    environments: Mapping[str, EnvironmentConfig]
    workers: Workers
    baselines: Mapping[str, Mapping[str, Sequence[EpisodeOutcome]]]
    """By environment: outcomes of the fixed policies on the first seeds, in their order."""

    async def judge(self, num_games: int) -> dict[str, EvalReport]:
        """By environment: the policy on the first `num_games` seeds, beside the fixed policies.

        Raises:
            UnavailableError: in one of them all games were lost.
        """
        return {name: await self._judge(name, num_games) for name in self.environments}

    async def _judge(self, environment: str, num_games: int) -> EvalReport:
        seeds = eval_seeds(self.config, num_games)
        outcomes = await self._play(environment, seeds)
        if all(outcome.episode_return is None for outcome in outcomes):
            raise UnavailableError(
                f"all {num_games} games of the evaluation in '{environment}' were lost: its "
                "server was unavailable for longer than environment.reconnect_timeout_s; see that "
                "it stays up"
            )
        played = self.baselines.get(environment, {})
        same = {name: of_policy[:num_games] for name, of_policy in played.items()}
        closed = _gap_closed(self.environments[environment], outcomes, same)
        return EvalReport(
            policy=summarise(outcomes),
            baselines={name: summarise(of_policy) for name, of_policy in same.items()},
            temperature=self.config.temperature,
            gap_closed=closed[0] if closed else None,
            gap_closed_ci95=closed[1] if closed else None,
        )

    async def _play(self, environment: str, seeds: Sequence[int]) -> list[EpisodeOutcome]:
        """One outcome per seed; games that infrastructure ended are played again."""
        played: dict[int, EpisodeOutcome] = {}
        missing = list(seeds)
        for _ in range(_MAX_ATTEMPTS):
            temperature = self.config.temperature
            outcomes = await self.workers.evaluate(environment, missing, temperature)
            played |= {outcome.seed: outcome for outcome in outcomes}
            missing = [seed for seed in seeds if played[seed].episode_return is None]
            if not missing:
                break
        return [played[seed] for seed in seeds]


def _gap_closed(
    environment: EnvironmentConfig,
    outcomes: Sequence[EpisodeOutcome],
    baselines: Mapping[str, Sequence[EpisodeOutcome]],
) -> tuple[float, tuple[float, float]] | None:
    worst, best = environment.random_policy, environment.optimal_policy
    if worst is None or best is None:
        return None
    return gap_closed(outcomes, baselines[worst], baselines[best])


async def play_baselines(
    client: AsyncEnvClient,
    policies: Mapping[str, FixedPolicy],
    baselines: Sequence[str],
    config: EvalConfig,
) -> dict[str, list[EpisodeOutcome]]:
    """The outcomes of the fixed policies `baselines` on one environment's evaluation seeds."""
    seeds = eval_seeds(config, max(config.num_games, config.num_games_during))
    return {name: await play_policy(client, policies[name], seeds) for name in baselines}


def eval_seeds(config: EvalConfig, num_games: int) -> list[int]:
    """The seeds of the first `num_games` evaluation games."""
    return list(range(config.seed, config.seed + num_games))
