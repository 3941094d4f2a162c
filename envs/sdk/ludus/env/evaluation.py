"""Judging policies: episodes on fixed deals, their statistics, and the play of fixed policies.

    seeds --play_policy--> EpisodeOutcome, one per seed --summarize--> PolicyResult
                                        |
                                        +--gap_closed--> share of the random-to-optimal gap

Policies are compared on the same seeds, so that luck with the deals cancels out. Episodes
that failed, whatever failed, have no return: they are counted, and enter no statistic.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from ludus.env.types import JsonObject, StepResult
from ludus.proto.errors import CapacityError, EnvError, UserError
from ludus.proto.runs import PolicyResult

Z95 = 1.959963984540054
"""The standard normal quantile of a two-sided 95 % interval."""

_EVEN = 1e-9
"""A return that is no farther from 0 is 0: rewards are rounded while they are added up."""
_MAX_REASON_CHARACTERS = 400
_FULL_SERVER_PAUSE_S = 0.05
_FULL_SERVER_TIMEOUT_S = 60.0

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """How one episode ended."""

    seed: int
    episode_return: float | None
    """Sum of the episode's rewards; None where the episode is void."""
    num_steps: int
    success: bool | None = None
    """What the environment said of it; None where it said nothing, or did not end the episode."""
    invalid: bool = False
    """True where the episode ended because the text was no action."""
    failure: str = ""
    """Why it is void; empty where it is not."""


class OutcomeKind(StrEnum):
    """How an episode went, in an environment that says whether episodes succeed."""

    WON = "won"
    DRAWN = "drawn"
    """It did not succeed, and earned nothing and cost nothing."""
    LOST = "lost"


class FixedPolicy(Protocol):
    """A policy that does not learn: from an observation to an action, both as JSON objects."""

    def __call__(self, observation: JsonObject, rng: random.Random) -> JsonObject:
        """The action; all of the policy's randomness comes from `rng`."""


class EvaluationSession(Protocol):
    """What `play_policy` needs of a session."""

    async def step(self, action: JsonObject) -> StepResult: ...

    async def close(self) -> None: ...


class EvaluationClient(Protocol):
    """What `play_policy` needs of a client; every `AsyncEnvClient` has it."""

    async def open(
        self, *, seed: int | None = None, close_when_done: bool = False
    ) -> tuple[EvaluationSession, StepResult]: ...


def wilson_interval(num_successes: int, num_trials: int) -> Interval:
    """The 95 % Wilson score interval of a proportion, without continuity correction.

    Source: Wilson, JASA 22 (1927), 209-212. No trials tell nothing: (0, 1).
    """
    if num_trials == 0:
        return 0.0, 1.0
    share = num_successes / num_trials
    shrink = 1 + Z95**2 / num_trials
    centre = (share + Z95**2 / (2 * num_trials)) / shrink
    spread = share * (1 - share) / num_trials + Z95**2 / (4 * num_trials**2)
    half_width = Z95 * math.sqrt(spread) / shrink
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def mean_interval(values: Sequence[float]) -> Interval:
    """The 95 % normal interval of the mean: mean -+ 1.96 * sample deviation / sqrt(n).

    A single value has no spread to judge by: both ends are the value itself.
    """
    if not values:
        raise ValueError("expected at least one value, got none")
    sample = np.asarray(values, dtype=np.float64)
    mean = float(sample.mean())
    if len(sample) == 1:
        return mean, mean
    half_width = Z95 * float(sample.std(ddof=1)) / math.sqrt(len(sample))
    return mean - half_width, mean + half_width


def classify_outcome(episode_return: float, success: bool | None) -> OutcomeKind:
    """How an episode went; one that the environment did not end has not succeeded."""
    if success:
        return OutcomeKind.WON
    return OutcomeKind.DRAWN if abs(episode_return) < _EVEN else OutcomeKind.LOST


def summarize(outcomes: Iterable[EpisodeOutcome]) -> PolicyResult:
    """The result of a policy over its valid episodes; the void ones are counted beside them.

    Wins and draws are known where the environment said of at least one whether it succeeded.

    Raises:
        ValueError: no episode is valid.
    """
    outcomes = list(outcomes)
    valid = [o for o in outcomes if o.episode_return is not None]
    returns = [o.episode_return for o in valid if o.episode_return is not None]
    if not returns:
        raise ValueError(
            f"expected at least one valid episode, got {len(outcomes)} that are all void: "
            f"{most_common_failure(outcomes)}"
        )
    num_games = len(returns)
    is_judged = any(o.success is not None for o in valid)
    standings = Counter(
        classify_outcome(value, o.success) for value, o in zip(returns, valid, strict=True)
    )
    num_wins = standings[OutcomeKind.WON]
    return PolicyResult(
        num_games=num_games,
        win_rate=num_wins / num_games if is_judged else None,
        win_rate_ci95=wilson_interval(num_wins, num_games) if is_judged else None,
        draw_rate=standings[OutcomeKind.DRAWN] / num_games if is_judged else None,
        expected_return=float(np.mean(returns)),
        expected_return_ci95=mean_interval(returns),
        invalid_rate=sum(o.invalid for o in valid) / num_games,
        num_void=len(outcomes) - num_games,
    )


def most_common_failure(outcomes: Iterable[EpisodeOutcome]) -> str:
    """The reason for which most of the void episodes are void."""
    reasons = Counter(o.failure for o in outcomes if o.episode_return is None)
    return reasons.most_common(1)[0][0] if reasons else ""


def gap_closed(
    policy: Sequence[EpisodeOutcome],
    random_policy: Sequence[EpisodeOutcome],
    optimal_policy: Sequence[EpisodeOutcome],
) -> tuple[float, Interval] | None:
    """The share of the random-to-optimal gap that a policy closed, and its 95 % interval.

    Over the n seeds that all three played to the end, with returns p, r and o:

        g = mean(p - r) / mean(o - r)
        interval = g -+ 1.96 * sd(e) / (sqrt(n) * mean(o - r)),  e = (p - r) - g * (o - r)

    which is the delta method for a ratio of paired means; it wants a gap that stands well
    clear of its own noise. None where the optimal policy is not above the random one, because
    there is no gap then.

    Raises:
        ValueError: no seed was played to the end by all three.
    """
    returns = [_return_of_seed(outcomes) for outcomes in (policy, random_policy, optimal_policy)]
    seeds = sorted(returns[0].keys() & returns[1].keys() & returns[2].keys())
    if not seeds:
        counts = ", ".join(str(len(of_seed)) for of_seed in returns)
        raise ValueError(
            "expected seeds that policy, random and optimal policy all played, got none in "
            f"common among {counts} episodes; play the three on the same seeds"
        )
    p, r, o = (np.array([of_seed[seed] for seed in seeds], dtype=np.float64) for of_seed in returns)
    gap = float(np.mean(o - r))
    if gap <= 0:
        return None
    share = float(np.mean(p - r)) / gap
    if len(seeds) == 1:
        return share, (share, share)
    residual = (p - r) - share * (o - r)
    half_width = Z95 * float(residual.std(ddof=1)) / (math.sqrt(len(seeds)) * gap)
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
    """The outcome of one episode per seed, in the order of `seeds`; one that fails is void.

    Args:
        max_turns: after so many an episode ends, with what it has earned; None is no limit.
        num_concurrent: sessions that are open at once, where the server has room for them.
        on_episode: called with each outcome as it comes, in no particular order.

    Raises:
        UserError: the environment or the policy cannot be used as it is.
    """
    outcomes: dict[int, EpisodeOutcome] = {}
    waiting = iter(enumerate(seeds))

    async def play_until_none_is_left() -> None:
        for index, seed in waiting:
            outcomes[index] = await _play_episode(client, policy, seed, max_turns)
            if on_episode is not None:
                on_episode(outcomes[index])

    players = [
        asyncio.create_task(play_until_none_is_left())
        for _ in range(min(num_concurrent, len(seeds)))
    ]
    try:
        await asyncio.gather(*players)
    finally:
        for player in players:
            player.cancel()
        await asyncio.gather(*players, return_exceptions=True)
    return [outcomes[index] for index in range(len(seeds))]


async def _play_episode(
    client: EvaluationClient, policy: FixedPolicy, seed: int, max_turns: int | None
) -> EpisodeOutcome:
    # A string seed: an environment that seeds random.Random(seed) must not share this stream.
    rng = random.Random(f"policy {seed}")
    num_steps, episode_return = 0, 0.0
    try:
        session, result = await _open(client, seed)
        try:
            while not result.done and (max_turns is None or num_steps < max_turns):
                result = await session.step(policy(result.observation, rng))
                num_steps += 1
                episode_return += result.reward or 0.0
        finally:
            # An episode that ended has freed its session by itself.
            if not result.done:
                with contextlib.suppress(EnvError):
                    await session.close()
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary to environments and policies
        reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARACTERS]
        return EpisodeOutcome(seed, episode_return=None, num_steps=num_steps, failure=reason)
    return EpisodeOutcome(seed, episode_return, num_steps, success=result.success)


async def _open(client: EvaluationClient, seed: int) -> tuple[EvaluationSession, StepResult]:
    """A session, once the server has room for it: others give theirs back."""
    deadline_s = time.monotonic() + _FULL_SERVER_TIMEOUT_S
    while True:
        try:
            return await client.open(seed=seed, close_when_done=True)
        except CapacityError:
            if time.monotonic() >= deadline_s:
                raise
            await asyncio.sleep(_FULL_SERVER_PAUSE_S)


def _return_of_seed(outcomes: Iterable[EpisodeOutcome]) -> Mapping[int, float]:
    return {o.seed: o.episode_return for o in outcomes if o.episode_return is not None}
