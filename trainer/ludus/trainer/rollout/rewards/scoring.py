"""Rewards of a group's episodes: a weighted sum of terms.

    played episodes --term by term--> values --weights--> rewards
                          |
                          +-- the environment's return, a reward function, which is called
                              once for the whole group, or a reward model

A reward function receives the keyword arguments that its signature names. Each argument is a list
with one entry for each episode that is not void. An asynchronous function runs on the event loop,
and other functions run in a thread.

An episode with an invalid action gets the additional reward `rollout.invalid_action_reward`. The
environment's return already includes it, so it is added only if the return is not a term. If a
function fails, its whole group fails, because the rewards could not be compared. A term of weight 0
is computed and reported, but does not change the reward.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter
from numbers import Real
from typing import Any

from ludus.env import Message
from ludus.proto.config.environment import RewardModelTerm, RewardTerm, make_reward_term_name
from ludus.proto.errors import RewardFunctionError, UserError
from ludus.proto.rewards import REWARD_RULE, is_valid_reward
from ludus.proto.runs import TranscriptTurn
from ludus.trainer.core.functions import import_callable
from ludus.trainer.core.types import Rollout, RolloutStatus, ScoredTerm
from ludus.trainer.data.failures import describe_error
from ludus.trainer.rollout.overlong import PENALTY_TERM
from ludus.trainer.rollout.rewards.arguments import (
    check_keyword_arguments,
    list_named_parameters,
    list_required_names,
)
from ludus.trainer.rollout.rewards.reward_models import Columns, QueuedRewardModel, RewardModels

ENVIRONMENT_TERM = RewardTerm()
"""The environment's return, with weight 1."""

_NUM_THREADS = 32


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """A rollout, with the arguments that reward functions receive for it."""

    rollout: Rollout
    prompt: Sequence[Message] | str = ()
    """Messages before the first completion; text if the data set has a text prompt."""
    completion: Sequence[Message] | str = ()
    """Messages from the first completion to the last one; text if the prompt is text."""
    completion_ids: Sequence[int] = ()
    """All sampled tokens."""
    fields: Mapping[str, Any] | None = None
    """Additional arguments, from the last result or the rollout function."""
    history: Iterable[TranscriptTurn] = ()
    """Turns of the episode for its transcript. They can be iterated only once."""
    unanswered: Sequence[Message] = ()
    """Messages after the last completion, for the transcript."""
    release: Callable[[], None] | None = None
    """Function that lets other episodes use the objects in `fields`; None if there are none."""

    @property
    def can_be_scored(self) -> bool:
        return not self.rollout.status.is_void

    @property
    def needs_score(self) -> bool:
        """True if the environment's return is unknown, so that a reward must be computed."""
        return self.can_be_scored and self.rollout.episode_return is None


class RewardFunction:
    """An imported reward function."""

    remedy = "make it faster or raise the limit"

    def __init__(self, path: str, term_name: str, executor: ThreadPoolExecutor) -> None:
        self.description = f"reward function '{path}' (term '{term_name}')"
        self._executor = executor
        self._function: Callable[..., Any] = import_callable(path, "environment.rewards.function")
        self._is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004 - `__call__` can be asynchronous
        )
        check_keyword_arguments(path, self._function)
        parameters = inspect.signature(self._function).parameters.values()
        self._accepts_any_argument = any(
            parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters
        )

    async def compute_values(self, columns: Columns, num_episodes: int) -> list[float | None]:
        """Return [num_episodes] values, one for each episode."""
        try:
            function_output = await self._call(self._select_columns(columns))
        except (UserError, RewardFunctionError):
            raise
        except (Exception, SystemExit) as error:  # the run's custom code
            message = f"{self.description} raised {describe_error(error)}"
            raise RewardFunctionError(message) from error
        return self._check_values(function_output, num_episodes)

    async def _call(self, arguments: Columns) -> Any:
        if self._is_async:
            return await self._function(**arguments)
        # A long computation must not block the other episodes.
        loop = asyncio.get_running_loop()
        call = partial(self._function, **arguments)
        function_output = await loop.run_in_executor(self._executor, call)
        return await function_output if inspect.isawaitable(function_output) else function_output

    def _select_columns(self, columns: Columns) -> Columns:
        missing_names = sorted(list_required_names(self._function) - columns.keys())
        if missing_names:
            raise RewardFunctionError(
                f"{self.description} requires '{missing_names[0]}', which no episode of the group "
                f"has; its arguments must be in {sorted(columns)}"
            )
        if self._accepts_any_argument:
            return columns
        names = list_named_parameters(self._function)
        return {name: columns[name] for name in names if name in columns}

    def _check_values(self, function_output: Any, num_episodes: int) -> list[float | None]:
        values = function_output.tolist() if hasattr(function_output, "tolist") else function_output
        if not isinstance(values, (list, tuple)) or len(values) != num_episodes:
            description = len(values) if isinstance(values, (list, tuple)) else repr(values)[:100]
            raise RewardFunctionError(
                f"{self.description} must return a list of {num_episodes} numbers or "
                f"None, one per episode, but it returned {description}"
            )
        return [self._check_number(value, index) for index, value in enumerate(values)]

    def _check_number(self, number: Any, index: int) -> float | None:
        if number is None:
            return None
        if hasattr(number, "item"):
            number = number.item()
        is_number = isinstance(number, Real)
        if not is_number or not is_valid_reward(number):
            raise RewardFunctionError(
                f"{self.description} must return {REWARD_RULE}, or None, but it "
                f"returned {number!r:.100} for episode {index}; return None for an episode that "
                "cannot be scored"
            )
        return float(number)


@dataclass(frozen=True, slots=True)
class _Term:
    """One term of a reward."""

    name: str
    weight: float
    scorer: RewardFunction | QueuedRewardModel | None
    """Function or model that computes the values; None for the environment's return."""
    is_optional: bool = False
    """True if an episode without a value of this term can have a reward."""


@dataclass(frozen=True, slots=True)
class _TermValues:
    """The values of one term for the episodes that can be scored."""

    term: _Term
    values: Sequence[float | None]
    failure: str = ""
    """Reason why the term has no values; empty if it has values."""


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
            reward_models: loaded models of this process, which all environments share.
        """
        # Functions that never return must not occupy the threads of other components.
        executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="reward")
        loaded_models = RewardModels() if reward_models is None else reward_models
        self._terms = [_make_term(term, executor, loaded_models) for term in terms]
        includes_return = any(term.scorer is None and term.weight for term in self._terms)
        self._invalid_action_reward = 0.0 if includes_return else invalid_action_reward
        """Reward to add for an invalid action; 0 if the environment's return includes it."""

    async def score(self, episodes: Sequence[PlayedEpisode], timeout_s: float) -> list[Rollout]:
        """Return the rollouts with their rewards. A reward is None if a term has no value.

        All episodes fail if a reward function raises, exceeds `timeout_s` or returns invalid
        values. If the environment's return of an episode is unknown, the reward replaces it.
        """
        scorable_episodes = [episode for episode in episodes if episode.can_be_scored]
        all_term_values = [
            await self._compute_term(term, scorable_episodes, timeout_s) for term in self._terms
        ]
        row_counter = itertools.count()
        rows = [next(row_counter) if episode.can_be_scored else None for episode in episodes]
        return [
            self._add_reward(episode.rollout, all_term_values, row)
            for episode, row in zip(episodes, rows, strict=True)
        ]

    async def _compute_term(
        self, term: _Term, episodes: Sequence[PlayedEpisode], timeout_s: float
    ) -> _TermValues:
        scorer = term.scorer
        if scorer is None or not episodes:
            return _TermValues(term, [episode.rollout.episode_return for episode in episodes])
        try:
            async with asyncio.timeout(timeout_s) as time_limit:
                values = await scorer.compute_values(_make_columns(episodes), len(episodes))
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - the run's custom code
            failure = describe_error(error)
            if time_limit.expired():
                failure = (
                    f"RewardFunctionError: {scorer.description} did not return within "
                    f"rollout.group_timeout_s = {timeout_s:g} s; {scorer.remedy}"
                )
            return _TermValues(term, [None] * len(episodes), failure)
        return _TermValues(term, values)

    def _add_reward(
        self, rollout: Rollout, all_term_values: Sequence[_TermValues], row: int | None
    ) -> Rollout:
        """Return the rollout with its reward.

        Args:
            row: index of the rollout in the values of each term; None if the rollout is void.
        """
        values = [
            None if row is None else term_values.values[row] for term_values in all_term_values
        ]
        terms = tuple(
            ScoredTerm(term_values.term.name, value)
            for term_values, value in zip(all_term_values, values, strict=True)
        )
        penalty = rollout.length_penalty
        if penalty is not None:
            terms = (*terms, ScoredTerm(PENALTY_TERM, penalty))
        if row is None:
            return replace(rollout, terms=terms)
        failed_terms = [term_values for term_values in all_term_values if term_values.failure]
        failure = failed_terms[0].failure if failed_terms else ""
        reward, status = _compute_weighted_sum(all_term_values, values), rollout.status
        if any(term_values.term.weight for term_values in failed_terms):
            reward, status = None, RolloutStatus.FAILED
        elif status is RolloutStatus.INVALID_ACTION and reward is not None:
            reward += self._invalid_action_reward
        episode_return = reward if rollout.episode_return is None else rollout.episode_return
        if reward is not None and penalty is not None:
            reward += penalty
        if reward is not None and not is_valid_reward(reward):
            failure = (
                f"the weighted sum of the reward's terms is {reward}, but it must be "
                f"{REWARD_RULE}; reduce the weights"
            )
            reward, status = None, RolloutStatus.FAILED
        return replace(
            rollout,
            reward=reward,
            episode_return=episode_return,
            terms=terms,
            status=status,
            failure=failure,
        )


def _compute_weighted_sum(
    all_term_values: Sequence[_TermValues], values: Sequence[float | None]
) -> float | None:
    """Return the weighted sum of the values; None if a term that is needed has no value."""
    weighted_terms = [
        (term_values.term, value)
        for term_values, value in zip(all_term_values, values, strict=True)
        if term_values.term.weight != 0
    ]
    needed_terms = [
        (term, value) for term, value in weighted_terms if value is not None or not term.is_optional
    ]
    weighted_sum = 0.0
    for term, value in needed_terms:
        if value is None:
            return None
        weighted_sum += term.weight * value
    return weighted_sum if needed_terms or not weighted_terms else None


def _make_term(
    term_config: RewardTerm | RewardModelTerm,
    executor: ThreadPoolExecutor,
    reward_models: RewardModels,
) -> _Term:
    name, scorer = make_reward_term_name(term_config), None
    if isinstance(term_config, RewardModelTerm):
        return _Term(name, term_config.weight, reward_models.load(term_config))
    if term_config.function is not None:
        scorer = RewardFunction(term_config.function, name, executor)
    return _Term(name, term_config.weight, scorer, term_config.optional)


def _make_columns(episodes: Sequence[PlayedEpisode]) -> Columns:
    """Return all arguments of a reward function. If an episode lacks a field, its entry is None.

    The standard arguments take precedence over fields with the same name.
    """
    rollouts = [episode.rollout for episode in episodes]
    columns: Columns = {}
    for name in sorted({key for episode in episodes for key in episode.fields or ()}):
        columns[name] = [(episode.fields or {}).get(name) for episode in episodes]
    return columns | {
        "prompts": [_copy_text(episode.prompt) for episode in episodes],
        "completions": [_copy_text(episode.completion) for episode in episodes],
        "completion_ids": [list(episode.completion_ids) for episode in episodes],
        "episode_return": [rollout.episode_return for rollout in rollouts],
        "terminated": [rollout.status is RolloutStatus.TERMINATED for rollout in rollouts],
        "status": [rollout.status.value for rollout in rollouts],
        "num_turns": [len(rollout.turns) for rollout in rollouts],
        "seed": [rollout.seed for rollout in rollouts],
        "environment": [rollout.environment for rollout in rollouts],
    }


def _copy_text(text: Sequence[Message] | str) -> list[Message] | str:
    """Return a copy of the messages, because a reward function may change them."""
    return text if isinstance(text, str) else list(text)
