"""Evaluation of the policy and of fixed policies, on seeds that training never uses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from ludus.env.client import AsyncEnvClient
from ludus.env.evaluation import (
    EpisodeOutcome,
    FixedPolicy,
    find_common_failure,
    measure_gap_closed,
    play_policy,
    summarize,
)
from ludus.env.types import TaskSet
from ludus.proto.config import EnvironmentConfig, EvalConfig
from ludus.proto.errors import EpisodesFailedError, LudusError
from ludus.proto.runs import EvalReport, Transcript
from ludus.trainer.actors.processes import Workers
from ludus.trainer.core.tasks import TimeLimitError, wait_with_limit

_log = logging.getLogger(__name__)

_NUM_SAMPLES = 8
"""Number of evaluation episodes per environment whose text is kept."""
_SAMPLES_TIMEOUT_S = 300.0
_MAX_ATTEMPTS = 3
"""Number of times that an episode is played if it is void each time."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates the policy on the same seeds as the fixed policies."""

    config: EvalConfig
    environments: Mapping[str, EnvironmentConfig]
    workers: Workers
    baselines: Mapping[str, Mapping[str, Sequence[EpisodeOutcome]]]
    """Outcomes by environment and fixed policy, in the order of the seeds."""
    max_games: Mapping[str, int] = field(default_factory=dict)
    """Maximum number of episodes, for environments in which it is limited."""
    games: Set[str] = frozenset()
    """Names of the environments that are games, not tasks."""

    async def evaluate(self, num_games: int) -> dict[str, EvalReport]:
        """Evaluate the policy on the first `num_games` seeds; return a report by environment."""
        return {
            name: await self._evaluate_environment(name, num_games) for name in self.environments
        }

    async def play_samples(self) -> list[Transcript]:
        """Play the first evaluation seeds; return the transcripts. A failure is only logged.

        An evaluation plays the same episodes, but keeps only their results.
        """
        transcripts: list[Transcript] = []
        seeds = list_eval_seeds(self.config, _NUM_SAMPLES)
        for name in self.environments:
            try:
                async with asyncio.timeout(_SAMPLES_TIMEOUT_S):
                    transcripts += await self.workers.play_samples(
                        name, seeds[: self.max_games.get(name)], self.config.temperature
                    )
            except (LudusError, TimeoutError) as error:
                _log.warning("no samples of '%s': %s", name, error or "they took too long")
        return transcripts

    async def _evaluate_environment(self, environment: str, num_games: int) -> EvalReport:
        num_played = min(num_games, self.max_games.get(environment, num_games))
        if num_played < num_games:
            _log.info(
                "the evaluation in '%s' plays %d episodes, not %d, because of its number of tasks "
                "(eval.max_games_per_task; one for each task at temperature 0)",
                environment,
                num_played,
                num_games,
            )
        outcomes = await play_until_valid(
            lambda seeds: self.workers.evaluate(environment, seeds, self.config.temperature),
            list_eval_seeds(self.config, num_played),
            f"the evaluation in '{environment}'",
            self.config,
        )
        baselines = {
            name: baseline[:num_games]
            for name, baseline in self.baselines.get(environment, {}).items()
            if any(outcome.episode_return is not None for outcome in baseline[:num_games])
        }
        gap_closed = _compute_gap_closed(self.environments[environment], outcomes, baselines)
        return EvalReport(
            policy=summarize(outcomes),
            baselines={name: summarize(baseline) for name, baseline in baselines.items()},
            temperature=self.config.temperature,
            gap_closed=gap_closed[0] if gap_closed else None,
            gap_closed_ci95=gap_closed[1] if gap_closed else None,
            num_games_requested=num_games if num_played < num_games else None,
            is_game=environment in self.games,
        )


async def play_baselines(
    client: AsyncEnvClient,
    policies: Mapping[str, FixedPolicy],
    baselines: Sequence[str],
    config: EvalConfig,
    max_turns: int,
    tasks: TaskSet | None = None,
) -> dict[str, list[EpisodeOutcome]]:
    """Play the evaluation episodes of one environment with the fixed policies `baselines`."""
    num_games = max(config.num_games, config.num_games_during)
    if tasks is not None and config.max_games_per_task is not None:
        # At temperature 0 too, because a fixed policy may be random.
        max_games = config.max_games_per_task * tasks.num_eval_tasks
        num_games = min(num_games, max_games or num_games)
    seeds = list_eval_seeds(config, num_games)
    return {
        name: await play_until_valid(
            partial(play_policy, client, policies[name], tasks=tasks, max_turns=max_turns),
            seeds,
            f"the fixed policy '{name}'",
            config,
        )
        for name in baselines
    }


def find_max_games(config: EvalConfig, tasks: TaskSet | None, *, has_agent: bool) -> int | None:
    """Return the maximum number of evaluation episodes of a policy; None without a limit.

    An agent may draw its own random numbers, so its episodes of one task differ at temperature 0.
    """
    if tasks is None or tasks.num_eval_tasks == 0:
        return None
    is_greedy = config.temperature == 0 and not has_agent
    max_games_per_task = 1 if is_greedy else config.max_games_per_task
    return None if max_games_per_task is None else max_games_per_task * tasks.num_eval_tasks


def list_eval_seeds(config: EvalConfig, num_games: int) -> list[int]:
    """Return the seeds of the first `num_games` evaluation episodes."""
    return list(range(config.seed, config.seed + num_games))


def _compute_gap_closed(
    environment: EnvironmentConfig,
    outcomes: Sequence[EpisodeOutcome],
    baselines: Mapping[str, Sequence[EpisodeOutcome]],
) -> tuple[float, tuple[float, float]] | None:
    """Return the share of the gap between two fixed policies that the policy closes, or None."""
    if environment.random_policy is None or environment.optimal_policy is None:
        return None
    random_outcomes = baselines.get(environment.random_policy, ())
    optimal_outcomes = baselines.get(environment.optimal_policy, ())
    valid_tasks = [
        {outcome.task for outcome in policy_outcomes if outcome.episode_return is not None}
        for policy_outcomes in (outcomes, random_outcomes, optimal_outcomes)
    ]
    if not set.intersection(*valid_tasks):
        return None
    return measure_gap_closed(outcomes, random_outcomes, optimal_outcomes)


async def play_until_valid(
    play: Callable[[Sequence[int]], Awaitable[list[EpisodeOutcome]]],
    seeds: Sequence[int],
    source: str,
    config: EvalConfig,
) -> list[EpisodeOutcome]:
    """Return one outcome per seed; play void episodes again, each a limited number of times.

    Raises:
        EpisodesFailedError: all episodes are void, or they exceed their time limit.
    """
    outcomes: dict[int, EpisodeOutcome] = {}
    pending_seeds = list(seeds)
    for _ in range(_MAX_ATTEMPTS):
        description = f"{len(pending_seeds)} episodes of {source}"
        new_outcomes = await _wait_for_outcomes(play(pending_seeds), description, config)
        outcomes |= {outcome.seed: outcome for outcome in new_outcomes}
        pending_seeds = [seed for seed in seeds if outcomes[seed].episode_return is None]
        if not pending_seeds:
            break
        _log.info("%d episodes of %s are void", len(pending_seeds), source)
    all_outcomes = [outcomes[seed] for seed in seeds]
    _check_void(all_outcomes, source)
    return all_outcomes


async def _wait_for_outcomes(
    episodes: Awaitable[list[EpisodeOutcome]], description: str, config: EvalConfig
) -> list[EpisodeOutcome]:
    try:
        return await wait_with_limit(
            episodes, description, timeout_s=config.timeout_s, setting="eval.timeout_s"
        )
    except TimeLimitError as error:
        raise EpisodesFailedError(str(error)) from None


def _check_void(outcomes: Sequence[EpisodeOutcome], source: str) -> None:
    """Log void episodes; fail if all episodes are void."""
    num_void = sum(outcome.episode_return is None for outcome in outcomes)
    if not num_void:
        return
    text = f"episodes of {source} are void; the most common reason: {find_common_failure(outcomes)}"
    if num_void == len(outcomes):
        raise EpisodesFailedError(f"all {num_void} {text}")
    _log.warning("%d of %d %s", num_void, len(outcomes), text)
