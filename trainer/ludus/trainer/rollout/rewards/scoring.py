"""Rewards of a group's episodes: a weighted sum of terms.

    played episodes --term by term--> values --weights--> rewards
                          |
                          +-- the environment's return, a reward function, which is called
                              once for the whole group, or a reward model

A reward function gets lists as keyword arguments, with one entry for each episode that is not
void, and receives the arguments that its signature names. An asynchronous function runs on the
event loop, any other in a thread.

An invalid action costs `rollout.invalid_action_reward`. The environment's return includes this
cost, and it is added to the reward if that return is not a term. A function that fails makes the
group void, because its rewards could not be compared. A term of weight 0 is shown and has no
effect.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter
from numbers import Real
from typing import Any

from ludus.env import Message
from ludus.proto.config.environment import RewardModelTerm, RewardTerm, make_reward_term_name
from ludus.proto.errors import ConfigError, RewardFunctionError, UserError, did_you_mean
from ludus.proto.runs import TranscriptTurn
from ludus.trainer.core.functions import import_object
from ludus.trainer.core.types import Rollout, RolloutStatus, ScoredTerm
from ludus.trainer.data.failures import describe_error
from ludus.trainer.rollout.rewards.reward_models import Columns, QueuedRewardModel, RewardModels

ENVIRONMENT_TERM = RewardTerm()
"""The environment's return, with weight 1."""

STANDARD_ARGUMENTS = frozenset(
    {
        "prompts",
        "completions",
        "completion_ids",
        "episode_return",
        "terminated",
        "status",
        "num_turns",
        "seed",
        "environment",
    }
)
"""Arguments that Ludus gives to every reward function that names them."""

_log = logging.getLogger(__name__)
_NUM_THREADS = 32


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """A rollout, and the arguments of reward functions that belong to it."""

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
    """Turns of the episode for its transcript, which can be read once."""

    @property
    def can_be_scored(self) -> bool:
        return not self.rollout.status.is_void

    @property
    def needs_score(self) -> bool:
        """True if the environment's return is unknown, so that only rewards measure the episode."""
        return self.can_be_scored and self.rollout.episode_return is None


class RewardFunction:
    """An imported reward function."""

    remedy = "make it faster or raise the limit"

    def __init__(self, path: str, term_name: str, threads: ThreadPoolExecutor) -> None:
        self.description = f"reward function '{path}' (term '{term_name}')"
        self._threads = threads
        self._function: Callable[..., Any] = import_object(path, "environment.rewards.function")
        self._is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004 - its coroutine, if it is one
        )
        kinds = {p.kind for p in inspect.signature(self._function).parameters.values()}
        if Parameter.POSITIONAL_ONLY in kinds:
            raise ConfigError(
                f"environment.rewards.function = '{path}' must take keyword arguments, but some "
                "are positional-only; remove the '/' from its signature"
            )
        self._accepts_all = Parameter.VAR_KEYWORD in kinds

    async def values(self, columns: Columns, num_episodes: int) -> list[float | None]:
        """Return [num_episodes] values, one for each episode."""
        try:
            returned = await self._call(self._select_columns(columns))
        except (UserError, RewardFunctionError):
            raise
        except (Exception, SystemExit) as error:  # the run's custom code
            raise RewardFunctionError(
                f"{self.description} raised {describe_error(error)}"
            ) from error
        return self._check_values(returned, num_episodes)

    async def _call(self, arguments: Columns) -> Any:
        if self._is_async:
            return await self._function(**arguments)
        # A long computation must not block the other episodes.
        loop = asyncio.get_running_loop()
        returned = await loop.run_in_executor(self._threads, partial(self._function, **arguments))
        return await returned if inspect.isawaitable(returned) else returned

    def _select_columns(self, columns: Columns) -> Columns:
        parameters = _named_parameters(self._function)
        missing_names = sorted(_required_names(self._function) - columns.keys())
        if missing_names:
            raise RewardFunctionError(
                f"{self.description} requires '{missing_names[0]}', which no episode of the group "
                f"has; its arguments must be in {sorted(columns)}"
            )
        if self._accepts_all:
            return columns
        return {name: columns[name] for name in parameters if name in columns}

    def _check_values(self, returned: Any, num_episodes: int) -> list[float | None]:
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(values, (list, tuple)) or len(values) != num_episodes:
            text = f"{len(values)}" if isinstance(values, (list, tuple)) else repr(values)[:100]
            raise RewardFunctionError(
                f"{self.description} must return a list of {num_episodes} numbers or "
                f"None, one per episode, but it returned {text}"
            )
        return [self._check_number(value, index) for index, value in enumerate(values)]

    def _check_number(self, value: Any, index: int) -> float | None:
        if value is None:
            return None
        if hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardFunctionError(
                f"{self.description} must return a finite number or None, but it "
                f"returned {value!r:.100} for episode {index}; return None for an episode that "
                "cannot be scored"
            )
        return float(value)


@dataclass(frozen=True, slots=True)
class _Term:
    """One term of a reward."""

    name: str
    weight: float
    scorer: RewardFunction | QueuedRewardModel | None
    """Function or model that returns the values; None for the environment's return."""


@dataclass(frozen=True, slots=True)
class _TermValues:
    """The values of one term for the episodes that can be scored."""

    term: _Term
    values: Sequence[float | None]
    failure: str = ""
    """Reason why the term has no values."""


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
            reward_models: the loaded models of this process, which all environments share.
        """
        # Functions that never return must not occupy the threads of other components.
        threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="reward")
        models = RewardModels() if reward_models is None else reward_models
        self._terms = [_make_term(term, threads, models) for term in terms]
        self._invalid_action_reward = invalid_action_reward
        self._includes_return = any(term.scorer is None and term.weight for term in self._terms)
        """True if the reward includes the environment's return, and so the invalid-action cost."""

    async def score(self, played: Sequence[PlayedEpisode], timeout_s: float) -> list[Rollout]:
        """Return the rollouts with their rewards; None if a term cannot score an episode.

        All of them fail if a reward function raises, exceeds `timeout_s` or returns no numbers. A
        reward also becomes the return of an episode whose environment reported none.
        """
        scored_episodes = [episode for episode in played if episode.can_be_scored]
        scores = [await self._evaluate(term, scored_episodes, timeout_s) for term in self._terms]
        rows = itertools.count()
        return [
            self._with_reward(
                episode.rollout, scores, next(rows) if episode.can_be_scored else None
            )
            for episode in played
        ]

    async def _evaluate(
        self, term: _Term, scored: Sequence[PlayedEpisode], timeout_s: float
    ) -> _TermValues:
        scorer = term.scorer
        if scorer is None or not scored:
            return _TermValues(term, [episode.rollout.episode_return for episode in scored])
        try:
            async with asyncio.timeout(timeout_s) as limit:
                values = await scorer.values(_make_columns(scored), len(scored))
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - the run's custom code
            failure = describe_error(error)
            if limit.expired():
                failure = (
                    f"RewardFunctionError: {scorer.description} did not return within "
                    f"rollout.group_timeout_s = {timeout_s:g} s; {scorer.remedy}"
                )
            return _TermValues(term, [None] * len(scored), failure)
        return _TermValues(term, values)

    def _with_reward(
        self, rollout: Rollout, scores: Sequence[_TermValues], row: int | None
    ) -> Rollout:
        """Return the rollout with the reward of its row; `row` is None for a void episode."""
        values = [None if row is None else score.values[row] for score in scores]
        terms = tuple(
            ScoredTerm(score.term.name, value) for score, value in zip(scores, values, strict=True)
        )
        if row is None:
            return replace(rollout, terms=terms)
        failed_scores = [score for score in scores if score.failure]
        failure = failed_scores[0].failure if failed_scores else ""
        reward, status = _weighted_sum(scores, values), rollout.status
        if any(score.term.weight for score in failed_scores):
            reward, status = None, RolloutStatus.FAILED
        elif (
            status is RolloutStatus.INVALID_ACTION
            and reward is not None
            and not self._includes_return
        ):
            reward += self._invalid_action_reward
        known_return = rollout.episode_return
        return replace(
            rollout,
            reward=reward,
            episode_return=reward if known_return is None else known_return,
            terms=terms,
            status=status,
            failure=failure,
        )


def _weighted_sum(scores: Sequence[_TermValues], values: Sequence[float | None]) -> float | None:
    """Return the weighted sum of the values; None if a term with a weight has no value."""
    total = 0.0
    for score, value in zip(scores, values, strict=True):
        if score.term.weight == 0:
            continue
        if value is None:
            return None
        total += score.term.weight * value
    return total


def _make_term(
    config: RewardTerm | RewardModelTerm, threads: ThreadPoolExecutor, models: RewardModels
) -> _Term:
    name, scorer = make_reward_term_name(config), None
    if isinstance(config, RewardModelTerm):
        return _Term(name, config.weight, models.load(config))
    if config.function is not None:
        scorer = RewardFunction(config.function, name, threads)
    return _Term(name, config.weight, scorer)


def _make_columns(episodes: Sequence[PlayedEpisode]) -> Columns:
    """Return every argument of a reward function; a field that an episode lacks is None.

    A field of an environment never hides an argument of Ludus.
    """
    rollouts = [episode.rollout for episode in episodes]
    columns: Columns = {}
    for name in sorted({key for episode in episodes for key in episode.fields or ()}):
        columns[name] = [(episode.fields or {}).get(name) for episode in episodes]
    return columns | {
        "prompts": [_copy(episode.prompt) for episode in episodes],
        "completions": [_copy(episode.completion) for episode in episodes],
        "completion_ids": [list(episode.completion_ids) for episode in episodes],
        "episode_return": [rollout.episode_return for rollout in rollouts],
        "terminated": [rollout.status is RolloutStatus.TERMINATED for rollout in rollouts],
        "status": [rollout.status.value for rollout in rollouts],
        "num_turns": [len(rollout.turns) for rollout in rollouts],
        "seed": [rollout.seed for rollout in rollouts],
        "environment": [rollout.environment for rollout in rollouts],
    }


def _copy(text: Sequence[Message] | str) -> list[Message] | str:
    """Return a copy that a reward function may change."""
    return text if isinstance(text, str) else list(text)


def check_columns(functions: Sequence[str], columns: Sequence[str], section: str) -> None:
    """Check that the data has every column that a reward function requires.

    Args:
        functions: the import path of each reward function.
        section: the environment's section in the configuration.

    Raises:
        ConfigError: a function requires a column that the data does not have.
    """
    names = sorted(STANDARD_ARGUMENTS.intersection(columns))
    if names and functions:
        _log.warning(
            "%s: reward functions get the trainer's argument %s; they do not see the data's column "
            "of that name",
            *(section, ", ".join(names)),
        )
    for path in functions:
        needed = _required_names(import_object(path, f"{section}.rewards"))
        for name in sorted(needed - STANDARD_ARGUMENTS - frozenset(columns)):
            hint = did_you_mean(name, columns)
            raise ConfigError(
                f"{section}.rewards: function '{path}' requires '{name}', and the data has the "
                f"columns {', '.join(columns)}"
                + (f"; {hint}" if hint else "; give its argument the name of one, or a default")
            )


def _named_parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters that can be passed by name."""
    parameters = inspect.signature(function).parameters
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}


def _required_names(function: Callable[..., Any]) -> set[str]:
    parameters = _named_parameters(function)
    return {name for name, parameter in parameters.items() if parameter.default is Parameter.empty}
