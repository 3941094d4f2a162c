"""Evaluation of policies: play on fixed seeds, statistics, and fixed policies.

    seeds --play_policy--> EpisodeOutcome, one per seed --summarize--> PolicyResult
                                        |
                                        +--measure_gap_closed--> share of the random-to-optimal gap

Policies are compared on the same seeds, so that luck cancels out. Void episodes have no return:
they are counted, and no other statistic includes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from ludus.env.types import JsonObject, StepResult
from ludus.proto.errors import EnvError, UserError
from ludus.proto.runs import PolicyResult

Z95 = 1.959963984540054
"""The standard normal quantile of a two-sided 95 % interval."""

_MAX_DRAW_RETURN = 1e-9
"""Returns closer to 0 count as draws, because sums of rewards have rounding errors."""
_MAX_REASON_CHARS = 400
_OPEN_TIMEOUT_S = 60.0

Interval = tuple[float, float]


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


def wilson_interval(num_successes: int, num_trials: int) -> Interval:
    """Return the 95 % Wilson score interval of a proportion, without continuity correction.

    Source: Wilson, JASA 22 (1927), 209-212. Without trials the interval is (0, 1).
    """
    if num_trials == 0:
        return 0.0, 1.0
    proportion = num_successes / num_trials
    denominator = 1 + Z95**2 / num_trials
    center = (proportion + Z95**2 / (2 * num_trials)) / denominator
    variance = proportion * (1 - proportion) / num_trials + Z95**2 / (4 * num_trials**2)
    half_width = Z95 * math.sqrt(variance) / denominator
    return max(0.0, center - half_width), min(1.0, center + half_width)


def compute_mean_interval(values: Sequence[float]) -> Interval:
    """Return the 95 % normal interval of the mean: mean -+ 1.96 * sample deviation / sqrt(n).

    A single value has no deviation, so both ends of the interval are the value.
    """
    if not values:
        raise ValueError("compute_mean_interval needs at least one value, got none")
    sample = np.asarray(values, dtype=np.float64)
    mean = float(sample.mean())
    if len(sample) == 1:
        return mean, mean
    half_width = Z95 * float(sample.std(ddof=1)) / math.sqrt(len(sample))
    return mean - half_width, mean + half_width


def classify_outcome(episode_return: float, success: bool | None) -> OutcomeKind:
    """Classify an outcome. An episode that was ended by a limit is not a success."""
    if success:
        return OutcomeKind.WON
    return OutcomeKind.DRAWN if abs(episode_return) < _MAX_DRAW_RETURN else OutcomeKind.LOST


def summarize(outcomes: Iterable[EpisodeOutcome]) -> PolicyResult:
    """Compute a policy's result over its valid episodes, and count the void ones.

    Win and draw rates are set if the environment reported the success of at least one episode.

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
    num_by_kind = Counter(
        classify_outcome(episode_return, outcome.success)
        for episode_return, outcome in zip(returns, valid_outcomes, strict=True)
    )
    num_wins = num_by_kind[OutcomeKind.WON]
    return PolicyResult(
        num_games=num_games,
        win_rate=num_wins / num_games if reports_success else None,
        win_rate_ci95=wilson_interval(num_wins, num_games) if reports_success else None,
        draw_rate=num_by_kind[OutcomeKind.DRAWN] / num_games if reports_success else None,
        expected_return=float(np.mean(returns)),
        expected_return_ci95=compute_mean_interval(returns),
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

    With n seeds that all three policies played, and their returns p, r and o:

        g = mean(p - r) / mean(o - r)
        interval = g -+ 1.96 * sd(e) / (sqrt(n) * mean(o - r)),  e = (p - r) - g * (o - r)

    This is the delta method for a ratio of paired means, which needs a gap much larger than its
    own standard error. Returns None if the optimal policy is not better than the random one.

    Raises:
        ValueError: no seed was played by all three policies.
    """
    returns = [_returns_by_seed(outcomes) for outcomes in (policy, random_policy, optimal_policy)]
    seeds = sorted(returns[0].keys() & returns[1].keys() & returns[2].keys())
    if not seeds:
        counts = ", ".join(str(len(returns_by_seed)) for returns_by_seed in returns)
        raise ValueError(
            f"the policy, the random and the optimal policy played {counts} episodes without a"
            " common seed; play all three on the same seeds"
        )
    p, r, o = (
        np.array([returns_by_seed[seed] for seed in seeds], dtype=np.float64)
        for returns_by_seed in returns
    )
    gap = float(np.mean(o - r))
    if gap <= 0:
        return None
    share = float(np.mean(p - r)) / gap
    if len(seeds) == 1:
        return share, (share, share)
    residuals = (p - r) - share * (o - r)
    half_width = Z95 * float(residuals.std(ddof=1)) / (math.sqrt(len(seeds)) * gap)
    return share, (share - half_width, share + half_width)


async def play_policy(
    client: EvaluationClient,
    policy: FixedPolicy,
    seeds: Sequence[int],
    *,
    max_turns: int | None = None,
    num_concurrent: int = 256,
    on_episode: Callable[[EpisodeOutcome], None] | None = None,
) -> list[EpisodeOutcome]:
    """Play one episode per seed and return the outcomes in the order of `seeds`.

    Args:
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
            outcomes[index] = await _play_episode(client, policy, seed, max_turns)
            if on_episode is not None:
                on_episode(outcomes[index])

    tasks = [asyncio.create_task(play_remaining()) for _ in range(min(num_concurrent, len(seeds)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [outcomes[index] for index in range(len(seeds))]


async def _play_episode(
    client: EvaluationClient, policy: FixedPolicy, seed: int, max_turns: int | None
) -> EpisodeOutcome:
    # A string seed, so that an environment with random.Random(seed) does not share the stream.
    rng = random.Random(f"policy {seed}")
    num_steps, episode_return = 0, 0.0
    try:
        session, result = await client.open(seed=seed, close_when_done=True, wait_s=_OPEN_TIMEOUT_S)
        try:
            while not result.done and (max_turns is None or num_steps < max_turns):
                result = await session.step(policy(result.observation, rng))
                num_steps += 1
                episode_return += result.reward or 0.0
        finally:
            # The end of an episode has closed its session.
            if not result.done:
                with contextlib.suppress(EnvError):
                    await session.close()
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary to environments and policies
        reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
        return EpisodeOutcome(seed, episode_return=None, num_steps=num_steps, failure=reason)
    return EpisodeOutcome(seed, episode_return, num_steps, success=result.success)


def _returns_by_seed(outcomes: Iterable[EpisodeOutcome]) -> Mapping[int, float]:
    return {
        outcome.seed: outcome.episode_return
        for outcome in outcomes
        if outcome.episode_return is not None
    }
