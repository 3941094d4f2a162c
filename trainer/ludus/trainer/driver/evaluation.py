"""Judges the policy on games that training never sees, beside fixed policies."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass

from ludus.env.client import AsyncEnvClient
from ludus.env.evaluation import (
    EpisodeOutcome,
    FixedPolicy,
    gap_closed,
    most_common_failure,
    play_policy,
    summarize,
)
from ludus.proto.config import EnvironmentConfig, EvalConfig
from ludus.proto.errors import EpisodesFailedError
from ludus.proto.runs import EvalReport
from ludus.trainer.actors.processes import Workers
from ludus.trainer.core.tasks import TookTooLongError, limited

_log = logging.getLogger(__name__)

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
            EpisodesFailedError: in one of them all games are void, or they take too long.
        """
        return {name: await self._judge(name, num_games) for name in self.environments}

    async def _judge(self, environment: str, num_games: int) -> EvalReport:
        seeds = eval_seeds(self.config, num_games)
        outcomes = await self._play(environment, seeds)
        _look_for_failures(outcomes, f"the evaluation in '{environment}'")
        played = self.baselines.get(environment, {})
        same = {
            name: of_policy[:num_games]
            for name, of_policy in played.items()
            if not _are_all_void(of_policy[:num_games])
        }
        closed = _gap_closed(self.environments[environment], outcomes, same)
        return EvalReport(
            policy=summarize(outcomes),
            baselines={name: summarize(of_policy) for name, of_policy in same.items()},
            temperature=self.config.temperature,
            gap_closed=closed[0] if closed else None,
            gap_closed_ci95=closed[1] if closed else None,
        )

    async def _play(self, environment: str, seeds: Sequence[int]) -> list[EpisodeOutcome]:
        """One outcome per seed; games that are void are played again."""
        played: dict[int, EpisodeOutcome] = {}
        missing = list(seeds)
        for _ in range(_MAX_ATTEMPTS):
            temperature = self.config.temperature
            outcomes = await _in_time(
                self.workers.evaluate(environment, missing, temperature),
                f"{len(missing)} games of the evaluation in '{environment}'",
                self.config,
            )
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
    compared = [outcomes, baselines.get(worst, ()), baselines.get(best, ())]
    valid = [{o.seed for o in one if o.episode_return is not None} for one in compared]
    if not set.intersection(*valid):
        return None
    return gap_closed(*compared)


async def play_baselines(
    client: AsyncEnvClient,
    policies: Mapping[str, FixedPolicy],
    baselines: Sequence[str],
    config: EvalConfig,
    max_turns: int,
) -> dict[str, list[EpisodeOutcome]]:
    """The outcomes of the fixed policies `baselines` on one environment's evaluation seeds.

    They have as many turns as the trained policy has.

    Raises:
        EpisodesFailedError: all games of one of them are void, or they take too long.
    """
    seeds = eval_seeds(config, max(config.num_games, config.num_games_during))
    played = {}
    for name in baselines:
        playing = play_policy(client, policies[name], seeds, max_turns=max_turns)
        what = f"{len(seeds)} games of the fixed policy '{name}'"
        played[name] = await _in_time(playing, what, config)
        _look_for_failures(played[name], f"the fixed policy '{name}'")
    return played


async def _in_time(
    playing: Awaitable[list[EpisodeOutcome]], what: str, config: EvalConfig
) -> list[EpisodeOutcome]:
    try:
        return await limited(playing, what, timeout_s=config.timeout_s, setting="eval.timeout_s")
    except TookTooLongError as error:
        raise EpisodesFailedError(str(error)) from None


def _are_all_void(outcomes: Sequence[EpisodeOutcome]) -> bool:
    return all(outcome.episode_return is None for outcome in outcomes)


def _look_for_failures(outcomes: Sequence[EpisodeOutcome], whose: str) -> None:
    """Log that games are void; raise EpisodesFailedError where all are."""
    num_void = sum(outcome.episode_return is None for outcome in outcomes)
    if not num_void:
        return
    reason = most_common_failure(outcomes)
    if num_void == len(outcomes):
        raise EpisodesFailedError(f"all {num_void} games of {whose} are void, most often: {reason}")
    _log.warning(
        "%d of %d games of %s are void, most often: %s", num_void, len(outcomes), whose, reason
    )


def eval_seeds(config: EvalConfig, num_games: int) -> list[int]:
    """The seeds of the first `num_games` evaluation games."""
    return list(range(config.seed, config.seed + num_games))
