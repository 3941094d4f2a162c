"""Evaluation of policies: play on fixed seeds, statistics, and fixed policies.

    seeds --play_policy--> EpisodeOutcome, one per seed --summarize--> PolicyResult
                                        |
                                        +--measure_gap_closed--> share of the random-to-optimal gap
                                        +--measure_difference--> paired difference of two policies

Policies are compared on the same seeds, so that luck cancels out. Void episodes have no return:
they are counted, and no other statistic includes them.

An environment with a fixed number of tasks (`TaskSet`) repeats tasks if there are more seeds than
tasks. Episodes of one task are not independent. So every interval is an interval over tasks: its
variance is that of the totals of the tasks (Cochran, Sampling Techniques, 1977, section 9A), and
its quantile is that of Student's t with one degree of freedom less than there are tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ludus.env.types import JsonObject, StepResult, TaskSet
from ludus.proto.errors import EnvError, ExecutionError, UserError
from ludus.proto.evaluations import INVALID_ACTION, EvaluatedEpisode
from ludus.proto.rewards import REWARD_RULE, is_valid_reward
from ludus.proto.runs import PolicyResult

Z95 = 1.959963984540054
"""The standard normal quantile of a two-sided 95 % interval."""

_MAX_DRAW_RETURN = 1e-9
"""Returns closer to 0 count as draws, because sums of rewards have rounding errors."""
_MAX_REASON_CHARS = 400
_OPEN_TIMEOUT_S = 60.0

Interval = tuple[float, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """The outcome of one episode."""

    seed: int
    episode_return: float | None
    """Sum of the episode's rewards; None if the episode is void."""
    num_steps: int
    success: bool | None = None
    """Success reported by the environment; None if unknown or if a limit ended the episode."""
    invalid: bool = False
    """True if the episode ended because a completion was not an action."""
    failure: str = ""
    """Reason why the episode is void; "" if it is valid."""
    task_seed: int | None = None
    """Seed with which the environment started, equal for all episodes of a task; None if it is
    `seed`, because every seed is a different task."""

    @property
    def task(self) -> int:
        """The key of the task, equal for all episodes of the same task."""
        return self.seed if self.task_seed is None else self.task_seed


class OutcomeKind(StrEnum):
    """The kind of an episode's outcome, in an environment that reports success."""

    WON = "won"
    DRAWN = "drawn"
    """Not successful, with a return of zero."""
    LOST = "lost"


class FixedPolicy(Protocol):
    """A policy that does not learn: a function from observation to action, both JSON objects."""

    def __call__(self, observation: JsonObject, rng: random.Random) -> JsonObject:
        """Return the action; all of the policy's randomness comes from `rng`."""


class EvaluationSession(Protocol):
    """The methods of a session that `play_policy` uses."""

    async def step(self, action: JsonObject) -> StepResult: ...

    async def close(self) -> None: ...


class EvaluationClient(Protocol):
    """The methods of a client that `play_policy` uses; every `AsyncEnvClient` has them."""

    async def open(
        self, *, seed: int | None = None, close_when_done: bool = False, wait_s: float = 0.0
    ) -> tuple[EvaluationSession, StepResult]: ...


def wilson_interval(num_successes: float, num_trials: float) -> Interval:
    """Return the 95 % Wilson score interval of a proportion, without continuity correction.

    Source: Wilson, JASA 22 (1927), 209-212. Without trials the interval is (0, 1). The trials must
    be independent; see `clustered_wilson_interval`.
    """
    if num_trials == 0:
        return 0.0, 1.0
    proportion = num_successes / num_trials
    denominator = 1 + Z95**2 / num_trials
    center = (proportion + Z95**2 / (2 * num_trials)) / denominator
    variance = proportion * (1 - proportion) / num_trials + Z95**2 / (4 * num_trials**2)
    half_width = Z95 * math.sqrt(variance) / denominator
    return max(0.0, center - half_width), min(1.0, center + half_width)


def clustered_wilson_interval(successes: Sequence[bool], tasks: Sequence[int]) -> Interval:
    """Return the 95 % Wilson interval of a proportion over episodes of `tasks`.

    The number of trials is the effective sample size: the number of independent episodes whose
    proportion has the same variance, times the squared ratio of both t quantiles (Korn and
    Graubard, Survey Methodology 24 (1998), 193-201). If every episode is another task, this is
    `wilson_interval`. If all episodes have the same outcome, each task counts once.
    """
    num_games = len(successes)
    totals, sizes = _sum_by_task(np.asarray(successes, dtype=np.float64), tasks)
    num_tasks, num_successes = len(sizes), float(totals.sum())
    if num_tasks == num_games:
        return wilson_interval(num_successes, num_games)
    proportion = num_successes / num_games
    num_effective = float(num_tasks)
    if num_tasks > 1 and 0 < proportion < 1:
        independent_variance = proportion * (1 - proportion) / (num_games - 1)
        design_effect = _compute_mean_variance(totals, sizes) / independent_variance
        num_effective = num_games / max(1.0, design_effect)
        num_effective *= (t_quantile(num_games - 1) / t_quantile(num_tasks - 1)) ** 2
    return wilson_interval(proportion * num_effective, num_effective)


def compute_mean_interval(values: Sequence[float], tasks: Sequence[int] | None = None) -> Interval:
    """Return the 95 % interval of the mean over episodes of `tasks`.

    Without `tasks`, every value is of a different task, and the interval is Student's: mean -+ t *
    sample deviation / sqrt(n). A single task has no deviation, so both ends are its mean.
    """
    if not len(values):
        raise ValueError("compute_mean_interval needs at least one value, got none")
    sample = np.asarray(values, dtype=np.float64)
    mean = float(sample.mean())
    totals, sizes = _sum_by_task(sample, range(len(sample)) if tasks is None else tasks)
    if len(sizes) == 1:
        return mean, mean
    half_width = t_quantile(len(sizes) - 1) * math.sqrt(_compute_mean_variance(totals, sizes))
    return mean - half_width, mean + half_width


def t_quantile(degrees_of_freedom: int) -> float:
    """Return the quantile of Student's t of a two-sided 95 % interval, within 0.2 %.

    It is exact for 1 and 2 degrees of freedom. The series for more is that of Cornish and Fisher
    (Abramowitz and Stegun, 1964, 26.7.5).
    """
    if degrees_of_freedom <= 2:
        return (math.tan(0.475 * math.pi), 0.95 / math.sqrt(0.04875))[degrees_of_freedom - 1]
    z, n = Z95, degrees_of_freedom
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / float(n) ** power for power, term in enumerate(terms))


def classify_outcome(episode_return: float, success: bool | None) -> OutcomeKind:
    """Classify an outcome. An episode that was ended by a limit is not a success."""
    if success:
        return OutcomeKind.WON
    return OutcomeKind.DRAWN if abs(episode_return) < _MAX_DRAW_RETURN else OutcomeKind.LOST


def summarize(outcomes: Iterable[EpisodeOutcome]) -> PolicyResult:
    """Compute a policy's result over its valid episodes, and count the void ones.

    Win and draw rates are set if the environment reported the success of at least one episode.
    Intervals are over tasks, so repeated episodes of a task do not make them narrower than that.

    Raises:
        ValueError: no episode is valid.
    """
    outcomes = list(outcomes)
    valid_outcomes = [outcome for outcome in outcomes if outcome.episode_return is not None]
    returns = [outcome.episode_return for outcome in outcomes if outcome.episode_return is not None]
    if not returns:
        raise ValueError(
            f"all {len(outcomes)} episodes are void; most common reason: "
            f"{find_common_failure(outcomes)}"
        )
    num_games = len(returns)
    reports_success = any(outcome.success is not None for outcome in valid_outcomes)
    kinds = [
        classify_outcome(episode_return, outcome.success)
        for episode_return, outcome in zip(returns, valid_outcomes, strict=True)
    ]
    tasks = [outcome.task for outcome in valid_outcomes]
    wins = [kind is OutcomeKind.WON for kind in kinds]
    return PolicyResult(
        num_games=num_games,
        num_tasks=len(set(tasks)),
        win_rate=sum(wins) / num_games if reports_success else None,
        win_rate_ci95=clustered_wilson_interval(wins, tasks) if reports_success else None,
        draw_rate=kinds.count(OutcomeKind.DRAWN) / num_games if reports_success else None,
        expected_return=float(np.mean(returns)),
        expected_return_ci95=compute_mean_interval(returns, tasks),
        invalid_rate=sum(outcome.invalid for outcome in valid_outcomes) / num_games,
        num_void=len(outcomes) - num_games,
    )


def find_common_failure(outcomes: Iterable[EpisodeOutcome]) -> str:
    """Return the most common reason why episodes are void; "" if none is void."""
    reasons = Counter(outcome.failure for outcome in outcomes if outcome.episode_return is None)
    return reasons.most_common(1)[0][0] if reasons else ""


def measure_gap_closed(
    policy: Sequence[EpisodeOutcome],
    random_policy: Sequence[EpisodeOutcome],
    optimal_policy: Sequence[EpisodeOutcome],
) -> tuple[float, Interval] | None:
    """Return the share of the random-to-optimal gap that a policy closed, with its 95 % interval.

    With n tasks that all three policies played, and their mean returns p, r and o in each task:

        g = mean(p - r) / mean(o - r)
        interval = g -+ t * sd(e) / (sqrt(n) * mean(o - r)),  e = (p - r) - g * (o - r)

    This is the delta method for a ratio of paired means, which needs a gap much larger than its
    own standard error. Returns None if the optimal policy is not better than the random one.

    Raises:
        ValueError: no task was played by all three policies.
    """
    returns = [_average_by_task(outcomes) for outcomes in (policy, random_policy, optimal_policy)]
    tasks = sorted(returns[0].keys() & returns[1].keys() & returns[2].keys())
    if not tasks:
        counts = ", ".join(map(str, map(len, (policy, random_policy, optimal_policy))))
        raise ValueError(
            f"the policy, the random and the optimal policy played {counts} episodes without a"
            " common valid task; play all three on the same seeds"
        )
    p, r, o = (
        np.array([returns_by_task[task] for task in tasks], dtype=np.float64)
        for returns_by_task in returns
    )
    gap = float(np.mean(o - r))
    if gap <= 0:
        return None
    share = float(np.mean(p - r)) / gap
    if len(tasks) == 1:
        return share, (share, share)
    residuals = (p - r) - share * (o - r)
    deviation = float(residuals.std(ddof=1))
    half_width = t_quantile(len(tasks) - 1) * deviation / (math.sqrt(len(tasks)) * gap)
    return share, (share - half_width, share + half_width)


def measure_difference(
    first: Iterable[EpisodeOutcome], second: Iterable[EpisodeOutcome]
) -> tuple[float, Interval, int] | None:
    """Return the mean paired difference of two policies' returns, its interval and its tasks.

    The difference of each task is that of the policies' mean returns in it, first minus second, and
    the interval is Student's over the tasks that both played. Returns None if there is no such
    task.
    """
    first_returns, second_returns = _average_by_task(first), _average_by_task(second)
    tasks = sorted(first_returns.keys() & second_returns.keys())
    if not tasks:
        return None
    differences = [first_returns[task] - second_returns[task] for task in tasks]
    mean = math.fsum(differences) / len(differences)
    return mean, compute_mean_interval(differences), len(tasks)


def measure_win_difference(
    first: Sequence[EpisodeOutcome], second: Sequence[EpisodeOutcome]
) -> tuple[float, Interval, int] | None:
    """Return the paired difference of two policies' win rates; see `measure_difference`.

    Returns None if the environment reported no success to one of them.
    """
    for outcomes in (first, second):
        if all(outcome.success is None for outcome in outcomes):
            return None
    return measure_difference(map(_score_win, first), map(_score_win, second))


def read_outcome(episode: EvaluatedEpisode) -> EpisodeOutcome:
    """Return the outcome of a recorded episode."""
    return EpisodeOutcome(
        episode.seed,
        episode.episode_return,
        episode.num_turns,
        success=episode.success,
        invalid=episode.status == INVALID_ACTION,
        failure=episode.failure,
        task_seed=episode.task_seed,
    )


async def play_policy(
    client: EvaluationClient,
    policy: FixedPolicy,
    seeds: Sequence[int],
    *,
    tasks: TaskSet | None = None,
    max_turns: int | None = None,
    num_concurrent: int = 256,
    on_episode: Callable[[EpisodeOutcome], None] | None = None,
) -> list[EpisodeOutcome]:
    """Play one episode per seed and return the outcomes in the order of `seeds`.

    Args:
        tasks: tasks of the environment, as its description reports them. Seeds beyond their number
            repeat tasks.
        max_turns: turns after which an episode ends with its rewards so far; None sets no limit.
        num_concurrent: maximum number of open sessions.
        on_episode: called with each outcome as soon as it is known, in any order.

    Raises:
        UserError: the environment or the policy cannot be used.
    """
    outcomes: dict[int, EpisodeOutcome] = {}
    remaining_seeds = iter(enumerate(seeds))

    async def play_remaining() -> None:
        for index, seed in remaining_seeds:
            task_seed = None if tasks is None else tasks.find_first_seed(seed)
            outcome = await _play_episode(client, policy, seed, task_seed, max_turns)
            outcomes[index] = outcome
            if on_episode is not None:
                on_episode(outcome)

    num_players = min(num_concurrent, len(seeds))
    players = [asyncio.create_task(play_remaining()) for _ in range(num_players)]
    try:
        await asyncio.gather(*players)
    finally:
        for player in players:
            player.cancel()
        await asyncio.gather(*players, return_exceptions=True)
    return [outcomes[index] for index in range(len(seeds))]


async def _play_episode(
    client: EvaluationClient,
    policy: FixedPolicy,
    seed: int,
    task_seed: int | None,
    max_turns: int | None,
) -> EpisodeOutcome:
    # A string seed, so that an environment with random.Random(seed) does not share the stream.
    rng = random.Random(f"policy {seed}")
    num_steps, episode_return = 0, 0.0
    try:
        session, result = await client.open(
            seed=seed if task_seed is None else task_seed,
            close_when_done=True,
            wait_s=_OPEN_TIMEOUT_S,
        )
        try:
            while not result.done and (max_turns is None or num_steps < max_turns):
                result = await session.step(policy(result.observation, rng))
                num_steps += 1
                reward = result.reward or 0.0
                episode_return += reward
                if not is_valid_reward(reward) or not is_valid_reward(episode_return):
                    raise ExecutionError(
                        f"the reward and the return must be {REWARD_RULE}, got {reward} and "
                        f"{episode_return}"
                    )
        finally:
            # The end of an episode has closed its session.
            if not result.done:
                with contextlib.suppress(EnvError):
                    await session.close()
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary to environments and policies
        reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
        return EpisodeOutcome(seed, None, num_steps, failure=reason, task_seed=task_seed)
    return EpisodeOutcome(
        seed, episode_return, num_steps, success=result.success, task_seed=task_seed
    )


def _score_win(outcome: EpisodeOutcome) -> EpisodeOutcome:
    """Return the outcome with return 1 for a success, otherwise 0; a void one is unchanged."""
    if outcome.episode_return is None:
        return outcome
    return replace(outcome, episode_return=float(bool(outcome.success)))


def _sum_by_task(values: Floats, tasks: Sequence[int]) -> tuple[Floats, Floats]:
    """Return the sum of the values and the number of values of each task."""
    _, index_of_task, sizes = np.unique(np.asarray(tasks), return_inverse=True, return_counts=True)
    totals = np.bincount(index_of_task, weights=values)
    return totals.astype(np.float64), sizes.astype(np.float64)


def _compute_mean_variance(totals: Floats, sizes: Floats) -> float:
    """Return the variance of sum(totals) / sum(sizes) over at least two independent tasks."""
    num_tasks, num_games = len(sizes), float(sizes.sum())
    deviations = totals - float(totals.sum()) / num_games * sizes
    return num_tasks / (num_tasks - 1) * float(np.square(deviations).sum()) / num_games**2


def _average_by_task(outcomes: Iterable[EpisodeOutcome]) -> Mapping[int, float]:
    """Return the mean return of the valid episodes of each task."""
    returns: dict[int, list[float]] = {}
    for outcome in outcomes:
        if outcome.episode_return is not None:
            returns.setdefault(outcome.task, []).append(outcome.episode_return)
    return {task: math.fsum(values) / len(values) for task, values in returns.items()}
