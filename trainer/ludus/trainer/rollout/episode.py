"""One episode: the policy and the environment in turns.

           messages               prompt tokens           sampled tokens
    adapter -----> conversation ----------------> generate ---------> text
     ^                                                                 |
     +----------------------------- reply <----------------------------+

A function of the run's own may take the place of this loop (`environment.rollout`), and so may an
agent that somebody else wrote (`environment.agent`, `ludus.trainer.agents`).

An episode that failed is data, whatever failed: it has no reward, its status is LOST where
infrastructure failed and FAILED where code did, and its reason is counted. Only a UserError, by
which the run cannot work as configured, leaves this module.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

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
from ludus.trainer.core.interfaces import GenerateFn
from ludus.trainer.core.streams import Stream, derive_key
from ludus.trainer.core.types import Rollout, RolloutStatus, Sampling, ScoredTerm, join_turns
from ludus.trainer.data.failures import describe, first_error
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.conversation import Conversation, ConversationFullError, Record
from ludus.trainer.rollout.environment_adapter import EnvironmentAdapter
from ludus.trainer.rollout.renderer import ChatRenderer
from ludus.trainer.rollout.rewards import PlayedEpisode, Reward
from ludus.trainer.rollout.tool_adapter import ToolAdapter, Toolbox

_OpenedT = TypeVar("_OpenedT")

_FULL_SERVER_PAUSE_S = 0.05


class NothingPlayedError(LudusError):
    """An episode that is over before the policy has said anything."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rollout function's episode ended."""

    status: RolloutStatus
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What reward functions may ask for beside what they always get."""
    failure: str = ""
    """Why it is void, where it is."""
    success: bool | None = None
    """What the last result of the environment says of the episode: `result.success`."""


RolloutFunction: TypeAlias = Callable[[AsyncSession, StepResult, Conversation], Awaitable[Ended]]
"""Plays one episode: (session, first result, conversation) -> how it ended."""


class Agent(Protocol):
    """Who plays episodes in its own way, asking the policy when it likes."""

    def begin(
        self, adapter: EnvironmentAdapter, seed: int, sampling: Sampling, key: int
    ) -> tuple[Record, Awaitable[Ended]]:
        """What will be kept of the episode, and how it will have ended once it is played.

        Args:
            key: decides what is sampled.
        """


@dataclass(frozen=True, slots=True)
class Player:
    """What it takes to play: the environment, the policy, and the language between them."""

    environment: str
    """Its name in the run."""
    client: AsyncEnvClient
    generate: GenerateFn
    chat: ChatTokenizer
    renderer: ChatRenderer
    limits: RolloutConfig
    """Those of this environment."""
    max_sessions: int = 0
    """That the environment holds at once; 0 where it does not say."""
    resumes: bool = False
    """Whether episodes that are lost with their server are played again up to where they were."""
    run_seed: int = 0
    place: int = 0
    """Of the environment in the run: in two of them the same seed samples other answers."""
    toolbox: Toolbox | None = None
    """Where answers call tools."""
    rollout_function: RolloutFunction | None = None
    """Plays the episodes in place of the usual loop."""
    agent: Agent | None = None
    """Plays the episodes in place of the usual loop, too."""
    reward: Reward = field(default_factory=Reward)
    """What `play_group` scores a group with."""

    async def play(self, seed: int, sampling: Sampling) -> Rollout:
        """One episode of an evaluation; its reward is the environment's own return.

        One that does not end within rollout.group_timeout_s is lost.

        Args:
            seed: played again, it samples the same answers.
            sampling: but for its `max_tokens`: that is the environment's.
        """
        key = derive_key(self.run_seed, Stream.EVALUATION_SAMPLING, self.place, seed)
        try:
            async with asyncio.timeout(self.limits.group_timeout_s) as limit:
                return (await self.play_alone(seed, sampling, key)).rollout
        except TimeoutError:
            if not limit.expired():
                raise
            return self.void(seed, self.late()).rollout

    async def play_alone(self, seed: int, sampling: Sampling, key: int) -> PlayedEpisode:
        """One episode, with all that reward functions may ask about it.

        Args:
            key: decides what is sampled.
        """
        try:
            opened = await when_there_is_room(
                lambda: self.client.open(seed=seed, close_when_done=True, resume=self.resumes)
            )
        except Exception as error:  # noqa: BLE001 - the boundary to code that is not ours
            return self.void(seed, error)
        return await self.play_opened(opened, seed, sampling, key)

    async def play_opened(
        self,
        opened: tuple[AsyncSession, StepResult],
        seed: int,
        sampling: Sampling,
        key: int,
    ) -> PlayedEpisode:
        """The episode that has begun in a session; the session is closed at its end."""
        session, first = opened
        record, playing = self._begin(session, first, seed, sampling, key)
        try:
            return self._finished(seed, record, await playing)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to code not ours
            return self.void(seed, error, record)
        finally:
            await close_session(session)

    async def open_group(self, seed: int, size: int) -> list[tuple[AsyncSession, StepResult]]:
        """Sessions whose episodes begin alike, all or none; waits while the server is full.

        Raises:
            GroupMismatchError: the environment does not follow its seed.
            InfrastructureError: the server is unavailable and did not come back in time.
        """
        return await when_there_is_room(
            lambda: self.client.open_group(
                size, seed=seed, close_when_done=True, resume=self.resumes
            )
        )

    def late(self) -> CallTimeoutError:
        """Why an episode is void that did not end in time."""
        return CallTimeoutError(
            f"expected the episode to end within rollout.group_timeout_s = "
            f"{self.limits.group_timeout_s:g}; raise it, or see what the environment or the engine "
            "waits for"
        )

    def void(self, seed: int, error: BaseException, record: Record | None = None) -> PlayedEpisode:
        """The episode that `error` ended, with what was said before; None where nothing began.

        Raises:
            UserError: `error` is one: no other episode would do better.
        """
        cause = first_error(error)
        if isinstance(cause, UserError):
            raise cause
        is_lost = isinstance(cause, InfrastructureError)
        status = RolloutStatus.LOST if is_lost else RolloutStatus.FAILED
        ended = Ended(status, failure=describe(error))
        return self._void(seed, record, ended, agent_died=isinstance(cause, AgentError))

    def _void(
        self, seed: int, record: Record | None, ended: Ended, *, agent_died: bool = False
    ) -> PlayedEpisode:
        turns = record.turns if record is not None else []
        rollout = Rollout(
            environment=self.environment,
            seed=seed,
            # Counted, and never trained on.
            sequences=(join_turns(turns),) if turns else (),
            reward=None,
            episode_return=None,
            terms=(),
            status=ended.status,
            policy_version=min((turn.completion.policy_version for turn in turns), default=0),
            failure=ended.failure or f"the rollout function says that it is {ended.status}",
            num_tool_calls=record.num_tool_calls if record else 0,
            num_tool_calls_failed=record.num_tool_calls_failed if record else 0,
            num_branches=record.num_branches if record else 0,
            agent_died=agent_died,
        )
        return PlayedEpisode(rollout, record=record)

    def _begin(
        self, session: AsyncSession, first: StepResult, seed: int, sampling: Sampling, key: int
    ) -> tuple[Record, Awaitable[Ended]]:
        """What is kept of the episode, and how it will have ended."""
        if self.agent is not None:
            return self.agent.begin(self._adapter(session, first), seed, sampling, key)
        conversation = Conversation(self.generate, self.chat, self.limits, sampling, key)
        return conversation, self._run(session, first, conversation)

    async def _run(
        self, session: AsyncSession, first: StepResult, conversation: Conversation
    ) -> Ended:
        if self.rollout_function is None:
            return await _take_turns(self._adapter(session, first), conversation)
        try:
            ended = await self.rollout_function(session, first, conversation)
        except ConversationFullError:
            return Ended(RolloutStatus.TRUNCATED)
        except ActionError:
            if not conversation.num_turns:
                # It was not the policy that asked for it.
                raise
            conversation.add_reward(self.limits.invalid_action_reward)
            return Ended(RolloutStatus.INVALID_ACTION)
        if not isinstance(ended, Ended):
            raise TypeError(
                f"environment '{self.environment}': rollout expected to return Ended(status, "
                f"fields), got {ended!r:.100}"
            )
        return ended

    def _adapter(self, session: AsyncSession, first: StepResult) -> EnvironmentAdapter:
        reward = self.limits.invalid_action_reward
        if self.toolbox is not None:
            return ToolAdapter(session, first, self.toolbox, reward)
        return EnvironmentAdapter(session, first, self.renderer, reward)

    def _finished(self, seed: int, record: Record, ended: Ended) -> PlayedEpisode:
        """The rollout, worth what the environment paid.

        Raises:
            ConversationFullError: not even the first answer had room.
            NothingPlayedError: nothing was sampled, for another reason.
        """
        turns, status = record.turns, RolloutStatus(ended.status)
        if status.is_void:
            return self._void(seed, record, ended)
        if not turns:
            record.refuse_if_full()
            raise NothingPlayedError(
                f"expected the policy to answer at least once, got an episode that is {status} "
                "before it did"
            )
        earned = sum(turn.reward for turn in turns)
        if not math.isfinite(earned):
            raise ValueError(f"expected finite rewards of the environment, got {earned} in all")
        rollout = Rollout(
            environment=self.environment,
            seed=seed,
            sequences=record.sequences(with_rest=status is RolloutStatus.TRUNCATED),
            reward=earned,
            episode_return=earned,
            terms=(ScoredTerm("environment", earned),),
            status=status,
            policy_version=min(turn.completion.policy_version for turn in turns),
            num_tool_calls=record.num_tool_calls,
            num_tool_calls_failed=record.num_tool_calls_failed,
            success=ended.success,
            num_branches=record.num_branches,
        )
        return PlayedEpisode(
            rollout,
            prompt=record.prompt,
            completion=record.completion,
            completion_ids=[token for turn in turns for token in turn.completion.token_ids],
            fields=ended.fields,
            record=record,
        )


async def _take_turns(adapter: EnvironmentAdapter, conversation: Conversation) -> Ended:
    """How the episode ended when the policy and the environment took turns."""
    opening = await adapter.opening()
    conversation.offer(opening.tools)
    conversation.add(opening.messages)
    status: RolloutStatus | None = None
    while status is None:
        if not conversation.has_room:
            status = RolloutStatus.TRUNCATED
            break
        reply = await adapter.reply(await conversation.answer())
        conversation.acted(reply.action)
        conversation.called(reply.num_calls, reply.num_calls_failed)
        conversation.add_reward(reply.reward)
        conversation.add(reply.messages)
        status = reply.status
    return Ended(status, LastResult(adapter.result), success=adapter.result.success)


class LastResult(Mapping[str, Any]):
    """Info and metadata of the last result, read only when a reward function asks."""

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self._fields: dict[str, Any] | None = None

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __iter__(self) -> Any:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def _read(self) -> dict[str, Any]:
        if self._fields is None:
            metadata = self._result.observation.get("metadata")
            known = metadata if isinstance(metadata, dict) else {}
            self._fields = {**known, **self._result.info}
        return self._fields


async def close_session(session: AsyncSession) -> None:
    """Free the session, unless what happened before has freed it."""
    try:
        await session.close()
    except EnvError:
        # It died with its server, or its environment fails in closing: nothing is left to free.
        return


async def when_there_is_room(
    open_: Callable[[], Awaitable[_OpenedT]], timeout_s: float = math.inf
) -> _OpenedT:
    """What `open_` returns, once the server has room for it.

    Raises:
        CapacityError: it had none for `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return await open_()
        except CapacityError:
            if time.monotonic() >= deadline_s:
                raise
            # Others of this run hold the sessions, and give them back when they are done.
            await asyncio.sleep(_FULL_SERVER_PAUSE_S)
