"""Episodes that are played in sessions, one session for each episode.

    one seed, and the server has room for G    open_group ---> G sessions with equal starts --+
                                                                                              |
    different seeds, or not enough room        G times open, one for each episode ------------+
                                                                                              v
                                                       G episodes at the same time, until the
                                                       last one ends or the time limit passes

Sessions that are opened together are opened all or none, and the server compares their first
observations. So an environment that ignores its seed is detected before anything is sampled, and
the group is void.

The turn loop, or a rollout function instead of it, plays an episode with one conversation:

           messages               prompt tokens           sampled tokens
    adapter -----> conversation ----------------> engine -----------> text
     ^                                                                 |
     +------------------------- apply_text <---------------------------+

An episode that fails is data, whatever the cause. It has no reward, its status is LOST if
infrastructure failed and FAILED if code failed, and its reason is counted. Only a UserError, which
means that the run cannot work as configured, leaves this module.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

from ludus.env import StepResult
from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.proto.config import RolloutConfig
from ludus.proto.errors import (
    ActionError,
    AgentError,
    CallTimeoutError,
    CapacityError,
    EnvError,
    InfrastructureError,
    LudusError,
    UserError,
)
from ludus.trainer.core.functions import import_object
from ludus.trainer.core.interfaces import GenerateFn
from ludus.trainer.core.tasks import Tasks
from ludus.trainer.core.types import Rollout, RolloutStatus, Sampling, ScoredTerm
from ludus.trainer.data.failures import describe_error, find_first_error
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.adapters.environment_adapter import (
    ChatRenderer,
    EnvironmentAdapter,
    make_renderer,
)
from ludus.trainer.rollout.adapters.tool_adapter import ToolAdapter, Toolbox
from ludus.trainer.rollout.conversation import (
    Conversation,
    ConversationFullError,
    EpisodeRecord,
)
from ludus.trainer.rollout.rewards.scoring import PlayedEpisode
from ludus.trainer.rollout.runner import EpisodeStart, RunnerParts

RecordT = TypeVar("RecordT", bound=EpisodeRecord[Any])
_OpenedT = TypeVar("_OpenedT")
_OpenSession = tuple[AsyncSession, StepResult]

_FULL_SERVER_PAUSE_S = 0.05


class NothingPlayedError(LudusError):
    """An episode that ended before the policy sampled a completion."""


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """The end of an episode, as a rollout function returns it."""

    status: RolloutStatus
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments for reward functions."""
    failure: str = ""
    """Reason why the episode is void; empty if it is not void."""
    success: bool | None = None
    """`success` of the environment's last result."""


RolloutFunction: TypeAlias = Callable[
    [AsyncSession, StepResult, Conversation], Awaitable[EpisodeEnd]
]
"""Plays one episode: (session, first result, conversation) -> end of the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRunner(ABC, Generic[RecordT]):
    """Base class of the runners that play each episode in its own session."""

    environment: str
    client: AsyncEnvClient
    generate: GenerateFn
    chat: ChatTokenizer
    renderer: ChatRenderer
    limits: RolloutConfig
    max_sessions: int = 0
    """Maximum number of sessions on the server at the same time; 0 if the server does not say."""
    resumes: bool = False
    """True if an episode that is lost with its server is replayed up to its last step."""
    toolbox: Toolbox | None = None
    """Tools that completions can call; None if completions are actions."""
    plays_groups_together: ClassVar[bool] = False
    record_class: ClassVar[type[Any]]
    """Class of the record of an episode, a subclass of EpisodeRecord."""

    @classmethod
    async def start(cls, parts: RunnerParts) -> Self:
        config = parts.config
        return cls(
            environment=parts.environment,
            client=parts.client,
            generate=parts.engine,
            chat=parts.chat,
            renderer=make_renderer(config),
            limits=parts.limits,
            max_sessions=(await parts.client.describe()).max_sessions,
            resumes=config.resume,
            toolbox=Toolbox(parts.client, parts.environment) if config.tools else None,
            **await cls.start_fields(parts),
        )

    @classmethod
    async def start_fields(cls, parts: RunnerParts) -> dict[str, Any]:
        """Return the fields that a subclass adds."""
        return {}

    @abstractmethod
    async def run(
        self, session: AsyncSession, first: StepResult, start: EpisodeStart, record: RecordT
    ) -> EpisodeEnd:
        """Play an episode from its first result to its end."""

    async def play_episodes(
        self, starts: Sequence[EpisodeStart], sampling: Sampling, *, is_evaluation: bool
    ) -> list[PlayedEpisode]:
        """Play the episodes of one group.

        On every way out, all episodes have ended and their sessions are closed.
        """
        deadline_s = asyncio.get_running_loop().time() + self.limits.group_timeout_s
        open_sessions: Sequence[_OpenSession | None] = [None] * len(starts)
        has_one_seed = len({start.seed for start in starts}) == 1
        if has_one_seed and 1 < len(starts) <= self.max_sessions:
            try:
                async with asyncio.timeout_at(deadline_s) as limit:
                    open_group = partial(self.client.open_group, len(starts), **self._open_args)
                    open_sessions = await retry_while_full(partial(open_group, seed=starts[0].seed))
            except Exception as error:  # noqa: BLE001 - third-party code runs here
                reason = self._timeout_error() if limit.expired() else error
                return [self.void(start.seed, reason) for start in starts]
        try:
            async with Tasks() as running:
                tasks = [
                    running.start(self._play_episode(start, sampling, session))
                    for start, session in zip(starts, open_sessions, strict=True)
                ]
                remaining_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
                in_time, _ = await asyncio.wait(tasks, timeout=remaining_s)
        finally:
            # An episode that was cancelled before its first line has not closed its session.
            for session in filter(None, open_sessions):
                await close_session(session[0])
        return [
            task.result() if task in in_time else self.void(start.seed, self._timeout_error())
            for task, start in zip(tasks, starts, strict=True)
        ]

    async def _play_episode(
        self, start: EpisodeStart, sampling: Sampling, opened: _OpenSession | None
    ) -> PlayedEpisode:
        """Play one episode in a session, which is closed at the end; open it if it is None."""
        try:
            if opened is None:
                open_session = partial(self.client.open, seed=start.seed, **self._open_args)
                opened = await retry_while_full(open_session)
        except Exception as error:  # noqa: BLE001 - third-party code runs here
            return self.void(start.seed, error)
        session, first_result = opened
        record: RecordT = self.record_class(
            self.generate, self.chat, self.limits, sampling, start.key
        )
        try:
            end = await self.run(session, first_result, start, record)
            return self._finish(start.seed, record, end)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code runs here
            return self.void(start.seed, error, record)
        finally:
            await close_session(session)

    def make_adapter(self, session: AsyncSession, first: StepResult) -> EnvironmentAdapter:
        """Return the adapter that turns completions into actions or tool calls."""
        reward = self.limits.invalid_action_reward
        if self.toolbox is not None:
            return ToolAdapter(session, first, self.toolbox, reward)
        return EnvironmentAdapter(session, first, self.renderer, reward)

    def void(
        self, seed: int, error: BaseException, record: EpisodeRecord[Any] | None = None
    ) -> PlayedEpisode:
        """Return the void episode that `error` ended; `record` is None if it did not start."""
        rollout = void_rollout(self.environment, seed, error)
        return PlayedEpisode(rollout) if record is None else _add_record(rollout, record)

    def _finish(self, seed: int, record: RecordT, end: EpisodeEnd) -> PlayedEpisode:
        """Return the played episode; its reward is the environment's return."""
        status = RolloutStatus(end.status)
        rollout = Rollout(self.environment, seed, (), None, None, (), status, policy_version=0)
        if status.is_void:
            reason = end.failure or f"the rollout function returned the status {status}"
            return _add_record(replace(rollout, failure=reason), record)
        if not record.turns:
            record.refuse_if_full()
            raise NothingPlayedError(
                f"the episode ended with status {status} before the policy sampled a completion; "
                "an episode needs at least one"
            )
        episode_return = sum(turn.reward for turn in record.turns)
        if not math.isfinite(episode_return):
            raise ValueError(
                f"the environment's rewards must be finite, but they add up to {episode_return}"
            )
        rollout = replace(
            rollout,
            reward=episode_return,
            episode_return=episode_return,
            terms=(ScoredTerm("environment", episode_return),),
            success=end.success,
        )
        return _add_record(rollout, record, end.fields)

    @property
    def _open_args(self) -> dict[str, Any]:
        return {"close_when_done": True, "resume": self.resumes}

    def _timeout_error(self) -> CallTimeoutError:
        return CallTimeoutError(
            f"the episode did not end within rollout.group_timeout_s = "
            f"{self.limits.group_timeout_s:g}; raise the limit, or check whether the environment "
            "or the engine is waiting for something"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLoopRunner(SessionRunner[Conversation]):
    """Lets the policy and the environment take turns."""

    record_class = Conversation

    async def run(
        self, session: AsyncSession, first: StepResult, start: EpisodeStart, record: Conversation
    ) -> EpisodeEnd:
        adapter = self.make_adapter(session, first)
        opening = await adapter.opening()
        record.offer_tools(opening.tools)
        record.add(opening.messages)
        status: RolloutStatus | None = None
        while status is None:
            if not record.has_room:
                status = RolloutStatus.TRUNCATED
                break
            outcome = await adapter.apply_text(await record.complete())
            record.record_action(outcome.action)
            record.record_calls(outcome.num_calls, outcome.num_calls_failed)
            record.add_reward(outcome.reward)
            record.add(outcome.messages)
            status = outcome.status
        return EpisodeEnd(status, LastResult(adapter.result), success=adapter.result.success)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRunner(TurnLoopRunner):
    """Replaces the turn loop with the rollout function that the configuration names."""

    function: RolloutFunction

    @classmethod
    async def start_fields(cls, parts: RunnerParts) -> dict[str, Any]:
        assert parts.config.rollout_function is not None
        return {"function": import_object(parts.config.rollout_function, "environment.rollout")}

    async def run(
        self, session: AsyncSession, first: StepResult, start: EpisodeStart, record: Conversation
    ) -> EpisodeEnd:
        try:
            end = await self.function(session, first, record)
        except ConversationFullError:
            return EpisodeEnd(RolloutStatus.TRUNCATED)
        except ActionError:
            if not record.num_turns:
                # The function chose this action, not the policy.
                raise
            record.add_reward(self.limits.invalid_action_reward)
            return EpisodeEnd(RolloutStatus.INVALID_ACTION)
        if not isinstance(end, EpisodeEnd):
            raise TypeError(
                f"environment '{self.environment}': the rollout function must return "
                f"EpisodeEnd(status, fields), but it returned {end!r:.100}"
            )
        return end


def void_rollout(environment: str, seed: int, error: BaseException) -> Rollout:
    """Return the rollout of an episode that `error` ended, without tokens.

    Raises:
        UserError: `error` is a UserError, which every other episode would raise too.
    """
    cause = find_first_error(error)
    if isinstance(cause, UserError):
        raise cause
    is_lost = isinstance(cause, InfrastructureError)
    status = RolloutStatus.LOST if is_lost else RolloutStatus.FAILED
    rollout = Rollout(environment, seed, (), None, None, (), status, 0, describe_error(error))
    return replace(rollout, agent_died=isinstance(cause, AgentError))


def _add_record(
    rollout: Rollout, record: EpisodeRecord[Any], fields: Mapping[str, Any] | None = None
) -> PlayedEpisode:
    """Return an episode with its record; the tokens of a void one are counted, never trained on."""
    completions = [turn.completion for turn in record.turns]
    rollout = replace(
        rollout,
        sequences=record.sequences(include_rest=rollout.status is RolloutStatus.TRUNCATED),
        policy_version=min((completion.policy_version for completion in completions), default=0),
        num_tool_calls=record.num_tool_calls,
        num_tool_calls_failed=record.num_tool_calls_failed,
        num_branches=record.num_branches,
    )
    return PlayedEpisode(
        rollout,
        prompt=record.prompt,
        completion=record.completion,
        completion_ids=[token for completion in completions for token in completion.token_ids],
        fields=fields,
        history=record.transcript_turns(),
    )


class LastResult(Mapping[str, Any]):
    """Info and metadata of the last result, parsed only when a reward function needs them."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    @cached_property
    def _fields(self) -> dict[str, Any]:
        return result_fields(self._result)

    def __getitem__(self, key: str) -> Any:
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def result_fields(result: StepResult) -> dict[str, Any]:
    """Return the info of a result and the metadata of its observation."""
    metadata = result.observation.get("metadata")
    return {**(metadata if isinstance(metadata, dict) else {}), **result.info}


async def close_session(session: AsyncSession) -> None:
    """Close the session unless an error has already closed it."""
    try:
        await session.close()
    except EnvError:
        # The server is gone, or the environment's `close` raised: nothing is left to close.
        return


async def retry_while_full(
    open_: Callable[[], Awaitable[_OpenedT]], timeout_s: float = math.inf
) -> _OpenedT:
    """Call `open_` until the server has room, and return its result.

    Raises:
        CapacityError: the server had no room for `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return await open_()
        except CapacityError:
            if time.monotonic() >= deadline_s:
                raise
            # Other episodes of this run use the sessions, and close them when they end.
            await asyncio.sleep(_FULL_SERVER_PAUSE_S)
