"""What the episodes of a group are worth: a weighted sum of terms.

    played episodes --term by term--> values --weights--> rewards
                          |
                          +-- the environment's own return, or a function of the run's,
                              called once with the whole group, or a reward model

A function gets lists, one entry per episode that is not void, as keyword arguments, and takes
those that it names. It runs on the event loop when it is asynchronous, else in a thread.

An answer that was no action costs `rollout.invalid_action_reward`, also where no term is the
environment's own return, of which it is a part. A function that fails voids the group: what cannot
be compared must not be learned from. A term of weight 0 is shown, and decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ludus.env import Message
from ludus.proto.config.environment import RewardModelTerm, RewardTerm, reward_term_name
from ludus.proto.errors import UserError
from ludus.trainer.core.types import Rollout, RolloutStatus, ScoredTerm
from ludus.trainer.data.failures import describe
from ludus.trainer.rollout.conversation import Readable
from ludus.trainer.rollout.reward_function import Columns, RewardFunction
from ludus.trainer.rollout.reward_models import RewardModels

ENVIRONMENT_TERM = RewardTerm()
"""The environment's own return, with weight 1."""

_NUM_THREADS = 32


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """A rollout, and what reward functions may ask about it."""

    rollout: Rollout
    prompt: Sequence[Message] | str = ()
    """The messages before the first answer; text where a data set asks with text."""
    completion: Sequence[Message] | str = ()
    """The first answer and all that follows, up to the last answer; text where the prompt is."""
    completion_ids: Sequence[int] = ()
    """All sampled tokens."""
    fields: Mapping[str, Any] | None = None
    """What the last result or a rollout function adds."""
    record: Readable | None = None
    """In which it was played; None where it never began."""

    @property
    def can_be_scored(self) -> bool:
        """False when it is void."""
        return not self.rollout.status.is_void


class Scorer(Protocol):
    """What says a number of each episode of a group."""

    async def values(
        self, name: str, columns: Columns, num_episodes: int, timeout_s: float
    ) -> Sequence[float | None]:
        """[num_episodes] what it says, as the term `name`; None of what it cannot score."""


@dataclass(frozen=True, slots=True)
class _Term:
    name: str
    weight: float
    scorer: Scorer | None
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
        terms: Sequence[RewardTerm | RewardModelTerm] = (ENVIRONMENT_TERM,),
        invalid_action_reward: float = -1.0,
        reward_models: RewardModels | None = None,
    ) -> None:
        """Import the functions, and load the reward models that are not loaded yet.

        Args:
            terms: what an episode is worth is their weighted sum.
            invalid_action_reward: what an answer costs that was no action.
            reward_models: those of this process, which all environments share.
        """
        # Functions that never end must keep no threads but their own.
        threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="reward")
        models = RewardModels() if reward_models is None else reward_models
        self._terms = [
            _Term(reward_term_name(term), term.weight, _scorer(term, threads, models))
            for term in terms
        ]
        self._invalid_action_reward = invalid_action_reward
        self._has_own = any(term.scorer is None and term.weight for term in self._terms)
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
        if term.scorer is None or not scored:
            return _Scores(term, [episode.rollout.episode_return for episode in scored])
        try:
            values = await term.scorer.values(term.name, _columns(scored), len(scored), timeout_s)
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


def _scorer(
    term: RewardTerm | RewardModelTerm, threads: ThreadPoolExecutor, models: RewardModels
) -> Scorer | None:
    if isinstance(term, RewardModelTerm):
        return models.scorer(term)
    return None if term.function is None else RewardFunction(term.function, threads)


def _columns(episodes: Sequence[PlayedEpisode]) -> Columns:
    """Every argument of a reward function; a field that some episodes lack is None there.

    A field of an environment never hides an argument of ours.
    """
    rollouts = [episode.rollout for episode in episodes]
    columns: Columns = {}
    for name in sorted({key for episode in episodes for key in episode.fields or ()}):
        columns[name] = [(episode.fields or {}).get(name) for episode in episodes]
    return columns | {
        "prompts": [_own(episode.prompt) for episode in episodes],
        "completions": [_own(episode.completion) for episode in episodes],
        "completion_ids": [list(episode.completion_ids) for episode in episodes],
        "episode_return": [rollout.episode_return for rollout in rollouts],
        "terminated": [rollout.status is RolloutStatus.TERMINATED for rollout in rollouts],
        "status": [rollout.status.value for rollout in rollouts],
        "num_turns": [len(rollout.turns) for rollout in rollouts],
        "seed": [rollout.seed for rollout in rollouts],
        "environment": [rollout.environment for rollout in rollouts],
    }


def _own(said: Sequence[Message] | str) -> list[Message] | str:
    """What a reward function may change."""
    return said if isinstance(said, str) else list(said)
