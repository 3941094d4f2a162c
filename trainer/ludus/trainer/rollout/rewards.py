"""What the episodes of a group are worth: a weighted sum of terms.

    played episodes --term by term--> values --weights--> rewards
                          |
                          +-- the environment's own return, or a function of the run's,
                              called once with the whole group

A function gets lists, one entry per episode that is not void, as keyword arguments, and takes
those that it names. It runs on the event loop when it is asynchronous, else in a thread.

An answer that was no action costs `rollout.invalid_action_reward`, also where no term is the
environment's own return, of which it is a part. A function that fails voids the group: what cannot
be compared must not be learned from. A term of weight 0 is shown, and decides nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

from ludus.env import Message
from ludus.proto.config.environment import RewardTerm, name_of_term
from ludus.proto.errors import ConfigError, RewardFunctionError, UserError
from ludus.trainer.data.failures import describe
from ludus.trainer.functions import import_object
from ludus.trainer.rollout.conversation import Conversation
from ludus.trainer.types import Rollout, RolloutStatus, ScoredTerm

ENVIRONMENT_TERM = RewardTerm()
"""The environment's own return, with weight 1."""

Columns = dict[str, list[Any]]

_NUM_THREADS = 32


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """A rollout, and what reward functions may ask about it."""

    rollout: Rollout
    prompt: Sequence[Message] = ()
    """The messages before the first answer."""
    completion: Sequence[Message] = ()
    """The first answer and all that follows, up to the last answer."""
    completion_ids: Sequence[int] = ()
    """All sampled tokens."""
    fields: Mapping[str, Any] | None = None
    """What the last result or a rollout function adds."""
    conversation: Conversation | None = None
    """In which it was played; None where it never began."""

    @property
    def can_be_scored(self) -> bool:
        """False when it is void."""
        return not self.rollout.status.is_void


@dataclass(frozen=True, slots=True)
class _Term:
    name: str
    weight: float
    function: _RewardFunction | None
    """None is the environment's own return."""


@dataclass(frozen=True, slots=True)
class _Scores:
    """What one term says of the episodes that can be scored."""

    term: _Term
    values: Sequence[float | None]
    failure: str = ""
    """Why it says nothing of any of them."""


class Reward:
    """The terms of one environment's reward."""

    def __init__(
        self,
        terms: Sequence[RewardTerm] = (ENVIRONMENT_TERM,),
        invalid_action_reward: float = -1.0,
    ) -> None:
        """`invalid_action_reward` is what an answer costs that was no action."""
        # Functions that never end must keep no threads but their own.
        threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="reward")
        self._terms = [
            _Term(
                name_of_term(term),
                term.weight,
                None if term.function is None else _RewardFunction(term.function, threads),
            )
            for term in terms
        ]
        self._invalid_action_reward = invalid_action_reward
        self._has_own = any(term.function is None and term.weight for term in self._terms)
        """Whether the environment's own return counts, which has that reward in it already."""

    async def score(self, played: Sequence[PlayedEpisode], timeout_s: float) -> list[Rollout]:
        """The rollouts with their rewards; one that a term cannot score has none.

        All of them have failed where a function of the run's own raised, took longer than
        `timeout_s`, or returned no rewards.
        """
        scored = [episode for episode in played if episode.can_be_scored]
        scores = [await self._ask(term, scored, timeout_s) for term in self._terms]
        rows = itertools.count()
        return [
            self._with_reward(
                episode.rollout, scores, next(rows) if episode.can_be_scored else None
            )
            for episode in played
        ]

    async def _ask(self, term: _Term, scored: Sequence[PlayedEpisode], timeout_s: float) -> _Scores:
        if term.function is None or not scored:
            return _Scores(term, [episode.rollout.episode_return for episode in scored])
        try:
            values = await term.function.values(term.name, _columns(scored), len(scored), timeout_s)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to the run's own code
            return _Scores(term, [None] * len(scored), describe(error))
        return _Scores(term, values)

    def _with_reward(self, rollout: Rollout, scores: Sequence[_Scores], row: int | None) -> Rollout:
        """The rollout with what its `row` of the scores is worth; a void one has none."""
        values = [None if row is None else one.values[row] for one in scores]
        terms = tuple(
            ScoredTerm(one.term.name, value) for one, value in zip(scores, values, strict=True)
        )
        if row is None:
            return replace(rollout, terms=terms)
        failed = [one for one in scores if one.failure]
        failure = failed[0].failure if failed else ""
        worth, status = _weighted_sum(scores, values), rollout.status
        if any(one.term.weight for one in failed):
            worth, status = None, RolloutStatus.FAILED
        elif status is RolloutStatus.INVALID_ACTION and worth is not None and not self._has_own:
            worth += self._invalid_action_reward
        return replace(rollout, reward=worth, terms=terms, status=status, failure=failure)


def _weighted_sum(scores: Sequence[_Scores], values: Sequence[float | None]) -> float | None:
    """What the terms are worth together; None where one that counts is unknown."""
    total = 0.0
    for one, value in zip(scores, values, strict=True):
        if one.term.weight == 0:
            continue
        if value is None:
            return None
        total += one.term.weight * value
    return total


class _RewardFunction:
    """One imported function, and which arguments it takes."""

    def __init__(self, path: str, threads: ThreadPoolExecutor) -> None:
        self._path = path
        self._threads = threads
        self._function: Callable[..., Any] = import_object(path, "environment.rewards.function")
        self._is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004 - its coroutine, if it is one
        )
        parameters = inspect.signature(self._function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._named = frozenset(p.name for p in named)
        self._required = frozenset(p.name for p in named if p.default is p.empty)
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ConfigError(
                f"environment.rewards.function = '{path}' expected keyword arguments, got "
                "positional-only ones; remove the '/' from its signature"
            )

    async def values(
        self, name: str, columns: Columns, num_episodes: int, timeout_s: float
    ) -> list[float | None]:
        """[num_episodes] what the function says of each episode."""
        arguments = self._arguments(columns)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                returned = await self._call(arguments)
        except UserError:
            raise
        except Exception as error:  # the boundary to the run's own code
            if isinstance(error, TimeoutError) and limit.expired():
                raise RewardFunctionError(
                    f"reward function '{self._path}' expected to end within "
                    f"rollout.group_timeout_s = {timeout_s:g} s, still running; make it faster or "
                    "raise the limit"
                ) from None
            raise RewardFunctionError(
                f"reward function '{self._path}' (term '{name}') raised {describe(error)}"
            ) from error
        return self._checked(returned, num_episodes)

    async def _call(self, arguments: Columns) -> Any:
        if self._is_async:
            return await self._function(**arguments)
        # A long computation must not keep the other episodes waiting.
        loop = asyncio.get_running_loop()
        returned = await loop.run_in_executor(self._threads, partial(self._function, **arguments))
        return await returned if inspect.isawaitable(returned) else returned

    def _arguments(self, columns: Columns) -> Columns:
        missing = sorted(self._required - columns.keys())
        if missing:
            raise RewardFunctionError(
                f"reward function '{self._path}' asks for '{missing[0]}', which no episode of the "
                f"group has; expected arguments out of {sorted(columns)}"
            )
        if self._takes_all:
            return columns
        return {key: value for key, value in columns.items() if key in self._named}

    def _checked(self, returned: Any, num_episodes: int) -> list[float | None]:
        listed = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(listed, (list, tuple)) or len(listed) != num_episodes:
            got = f"{len(listed)}" if isinstance(listed, (list, tuple)) else repr(listed)[:100]
            raise RewardFunctionError(
                f"reward function '{self._path}' expected to return a list of {num_episodes} "
                f"numbers or None, one per episode, got {got}"
            )
        return [self._number(value, index) for index, value in enumerate(listed)]

    def _number(self, value: Any, index: int) -> float | None:
        if value is None:
            return None
        if hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardFunctionError(
                f"reward function '{self._path}' expected a finite number or None for episode "
                f"{index}, got {value!r:.100}; return None for an episode that cannot be scored"
            )
        return float(value)


def _columns(episodes: Sequence[PlayedEpisode]) -> Columns:
    """Every argument of a reward function; a field that some episodes lack is None there.

    A field of an environment never hides an argument of ours.
    """
    rollouts = [episode.rollout for episode in episodes]
    columns: Columns = {}
    for name in sorted({key for episode in episodes for key in episode.fields or ()}):
        columns[name] = [(episode.fields or {}).get(name) for episode in episodes]
    return columns | {
        "prompts": [list(episode.prompt) for episode in episodes],
        "completions": [list(episode.completion) for episode in episodes],
        "completion_ids": [list(episode.completion_ids) for episode in episodes],
        "episode_return": [rollout.episode_return for rollout in rollouts],
        "terminated": [rollout.status is RolloutStatus.TERMINATED for rollout in rollouts],
        "status": [rollout.status.value for rollout in rollouts],
        "num_turns": [len(rollout.turns) for rollout in rollouts],
        "seed": [rollout.seed for rollout in rollouts],
        "environment": [rollout.environment for rollout in rollouts],
    }
