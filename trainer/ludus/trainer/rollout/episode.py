"""Episodes that are played in sessions, one session for each episode.

    one seed, and the server has room for G    open_group ---> G sessions with equal starts --+
                                                                                              |
    different seeds, or not enough room        G times open, one for each episode ------------+
                                                                                              v
                                                       G episodes at the same time, until the
                                                       last one ends or the time limit passes

`open_group` opens either all sessions or none, and the server compares their first observations.
This detects an environment that ignores its seed before anything is sampled. The group is then
void.

The turn loop plays an episode with one conversation. A rollout function can replace it.

           messages               prompt tokens           sampled tokens
    adapter -----> conversation ----------------> engine -----------> text
     ^                                                                 |
     +------------------------- apply_text <---------------------------+

An episode that fails is returned as a void episode, and its error is not raised. Its status is LOST
if infrastructure failed, and FAILED if code failed. The only error that is raised is a UserError,
which means that the run cannot work as configured.
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
from ludus.proto.rewards import REWARD_RULE, is_valid_reward
from ludus.trainer.core.functions import import_callable
from ludus.trainer.core.interfaces import GenerateFunction
from ludus.trainer.core.tasks import CancellingTaskGroup
from ludus.trainer.core.types import Rollout, RolloutStatus, Sampling, ScoredTerm
from ludus.trainer.data.failures import describe_error, find_first_error
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tool_calls import CallForm
from ludus.trainer.rollout.adapters.environment_adapter import (
    ChatRenderer,
    EnvironmentAdapter,
    make_renderer,
)
from ludus.trainer.rollout.adapters.tool_adapter import ToolAdapter, Toolbox
from ludus.trainer.rollout.conversation import Conversation, ConversationFullError, EpisodeRecord
from ludus.trainer.rollout.legal_answers import LegalAnswers
from ludus.trainer.rollout.overlong import judge_length
from ludus.trainer.rollout.rewards.scoring import PlayedEpisode
from ludus.trainer.rollout.runner import EpisodeStart, RunnerComponents

RecordT = TypeVar("RecordT", bound=EpisodeRecord[Any])
_SessionT = TypeVar("_SessionT")
_NewSession = tuple[AsyncSession, StepResult]
"""A new session and its first result."""

_FULL_SERVER_PAUSE_S = 0.05


class NothingPlayedError(LudusError):
    """An episode that ended before the policy sampled a completion."""


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """The status of an ended episode, as a rollout function returns it."""

    status: RolloutStatus
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments for reward functions."""
    failure: str = ""
    """Reason why the episode is void; empty if it is not void."""
    success: bool | None = None
    """`success` of the environment's last result."""
    hit_limit: bool = False
    """True if a limit of the run ended the episode, not the environment."""


RolloutFunction: TypeAlias = Callable[
    [AsyncSession, StepResult, Conversation], Awaitable[EpisodeEnd]
]
"""Function that plays one episode: (session, first result, conversation) -> episode end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRunner(ABC, Generic[RecordT]):
    """Base class of the runners that play each episode in its own session."""

    environment: str
    client: AsyncEnvClient
    generate: GenerateFunction
    chat: ChatTokenizer
    renderer: ChatRenderer
    limits: RolloutConfig
    max_sessions: int = 0
    """Maximum number of concurrent sessions on the server; 0 if the server does not report it."""
    replays_lost_episodes: bool = False
    """True if an episode whose server is lost is replayed on another server and continued."""
    toolbox: Toolbox | None = None
    """Tools that completions can call; None if every completion is an action."""
    legal_answers: LegalAnswers | None = None
    """Legal answers to which completions are restricted; None if they are not restricted."""
    plays_groups_together: ClassVar[bool] = False
    record_class: ClassVar[type[Any]]
    """Class of the record of an episode, a subclass of EpisodeRecord."""

    @classmethod
    async def start(cls, components: RunnerComponents) -> Self:
        config, chat, limits = components.config, components.chat, components.limits
        name, legal_answers = components.environment, None
        if limits.constrain == "legal_answers":
            legal_answers = LegalAnswers(chat, name, limits.max_completion_tokens)
        return cls(
            environment=name,
            client=components.client,
            generate=components.engine,
            chat=chat,
            renderer=make_renderer(config, name),
            limits=limits,
            max_sessions=(await components.client.describe()).max_sessions,
            replays_lost_episodes=config.resume,
            toolbox=Toolbox(components.client, name) if config.tools else None,
            legal_answers=legal_answers,
            **await cls.start_extra_fields(components),
        )

    @classmethod
    async def start_extra_fields(cls, components: RunnerComponents) -> dict[str, Any]:
        """Return the fields that a subclass adds."""
        return {}

    @abstractmethod
    async def play_to_end(
        self, session: AsyncSession, first_result: StepResult, seed: int, record: RecordT
    ) -> EpisodeEnd:
        """Play an episode from its first result to its end."""

    async def play_episodes(
        self, starts: Sequence[EpisodeStart], sampling: Sampling, *, is_evaluation: bool
    ) -> list[PlayedEpisode]:
        """Play the episodes of one group.

        When this method returns or raises, all episodes have ended and all sessions are closed.
        """
        deadline_s = asyncio.get_running_loop().time() + self.limits.group_timeout_s
        new_sessions: Sequence[_NewSession | None] = [None] * len(starts)
        has_one_seed = len({start.seed for start in starts}) == 1
        if has_one_seed and 1 < len(starts) <= self.max_sessions:
            open_group = partial(self.client.open_group, len(starts), **self._open_arguments)
            try:
                async with asyncio.timeout_at(deadline_s) as time_limit:
                    new_sessions = await retry_while_full(partial(open_group, seed=starts[0].seed))
            except Exception as error:  # noqa: BLE001 - third-party code runs here
                cause = self._make_timeout_error() if time_limit.expired() else error
                return [self.make_void_episode(start.seed, cause) for start in starts]
        try:
            async with CancellingTaskGroup() as task_group:
                tasks = [
                    task_group.start(self._play_episode(start, sampling, new_session))
                    for start, new_session in zip(starts, new_sessions, strict=True)
                ]
                remaining_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
                finished_tasks, _ = await asyncio.wait(tasks, timeout=remaining_s)
        finally:
            # A task that was cancelled before it started has not closed its session.
            for session, _ in filter(None, new_sessions):
                await close_session(session)
        return [
            task.result()
            if task in finished_tasks
            else self.make_void_episode(start.seed, self._make_timeout_error())
            for task, start in zip(tasks, starts, strict=True)
        ]

    async def _play_episode(
        self, start: EpisodeStart, sampling: Sampling, new_session: _NewSession | None
    ) -> PlayedEpisode:
        """Play one episode and close its session. If `new_session` is None, open a session."""
        try:
            if new_session is None:
                open_session = partial(self.client.open, seed=start.seed, **self._open_arguments)
                new_session = await retry_while_full(open_session)
        except Exception as error:  # noqa: BLE001 - third-party code runs here
            return self.make_void_episode(start.seed, error)
        session, first_result = new_session
        record = self.make_record(sampling, start.key)
        try:
            end = await self.play_to_end(session, first_result, start.seed, record)
            return self._make_played_episode(start.seed, record, end)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code runs here
            return self.make_void_episode(start.seed, error, record)
        finally:
            await close_session(session)

    def make_record(self, sampling: Sampling, key: int) -> RecordT:
        """Return the empty record of an episode."""
        record: RecordT = self.record_class(self.generate, self.chat, self.limits, sampling, key)
        return record

    @property
    def call_form(self) -> CallForm:
        """Form of the tool calls in completions."""
        return self.chat.call_form

    def make_adapter(self, session: AsyncSession, first_result: StepResult) -> EnvironmentAdapter:
        """Return the adapter that turns completions into actions or tool calls."""
        invalid_action_reward = self.limits.known_invalid_action_reward
        if self.toolbox is not None:
            return ToolAdapter(
                session,
                first_result,
                self.toolbox,
                invalid_action_reward,
                self.call_form,
            )
        return EnvironmentAdapter(session, first_result, self.renderer, invalid_action_reward)

    def make_void_episode(
        self, seed: int, error: BaseException, record: EpisodeRecord[Any] | None = None
    ) -> PlayedEpisode:
        """Return a void episode that `error` ended. `record` is None if no session was opened."""
        rollout = make_void_rollout(self.environment, seed, error)
        return PlayedEpisode(rollout) if record is None else _add_record(rollout, record)

    def _make_played_episode(self, seed: int, record: RecordT, end: EpisodeEnd) -> PlayedEpisode:
        """Return the played episode with the environment's return as its reward."""
        status = RolloutStatus(end.status)
        rollout = Rollout(self.environment, seed, (), None, None, (), status, policy_version=0)
        if status.is_void:
            failure = end.failure or f"the rollout function returned the status {status}"
            return _add_record(replace(rollout, failure=failure), record)
        if not record.turns:
            record.refuse_if_full()
            raise NothingPlayedError(
                f"the episode ended with status {status} before the policy sampled a completion; "
                "an episode needs at least one"
            )
        episode_return = sum(turn.reward for turn in record.turns)
        for reward in (*(turn.reward for turn in record.turns), episode_return):
            if not is_valid_reward(reward):
                raise ValueError(
                    "the environment's rewards and their sum, the return, must be "
                    f"{REWARD_RULE}, got {reward}"
                )
        rollout = replace(
            rollout,
            reward=episode_return,
            episode_return=episode_return,
            terms=(ScoredTerm("environment", episode_return),),
            success=end.success,
        )
        if end.hit_limit:
            is_at_last_turn = record.num_turns >= self.limits.max_turns
            rollout = replace(rollout, limit="turns" if is_at_last_turn else "tokens")
        rollout = judge_length(
            rollout,
            self.limits,
            num_tokens=max(len(turn.completion.token_ids) for turn in record.turns),
            is_overlong=end.hit_limit or any(turn.is_cut for turn in record.turns),
        )
        return _add_record(rollout, record, end.fields)

    @property
    def _open_arguments(self) -> dict[str, Any]:
        return {"close_when_done": True, "resume": self.replays_lost_episodes}

    def _make_timeout_error(self) -> CallTimeoutError:
        return CallTimeoutError(
            f"the episode did not end within rollout.group_timeout_s = "
            f"{self.limits.group_timeout_s:g}; raise the limit, or check whether the environment "
            "or the engine is waiting for something"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLoopRunner(SessionRunner[Conversation]):
    """A runner in which the policy and the environment take turns."""

    record_class = Conversation

    async def play_to_end(
        self, session: AsyncSession, first_result: StepResult, seed: int, record: Conversation
    ) -> EpisodeEnd:
        adapter = self.make_adapter(session, first_result)
        opening = await adapter.make_opening()
        record.offer_tools(opening.tools)
        record.add(opening.messages)
        status: RolloutStatus | None = None
        while status is None:
            await record.encode_long_messages()
            if not record.has_room:
                break
            answers = None
            if self.legal_answers is not None:
                answers = self.legal_answers.make_trie(adapter.last_result)
            text = record.thoughts.get_answer(await record.complete(answers))
            outcome = await adapter.apply_text(text)
            record.record_action(outcome.action)
            record.record_calls(outcome.num_calls, outcome.num_calls_failed)
            record.add_reward(outcome.reward)
            record.add(outcome.messages)
            status = outcome.status
        result, end_status = adapter.last_result, status or RolloutStatus.TRUNCATED
        return EpisodeEnd(
            end_status,
            LastResultFields(result),
            success=result.success,
            hit_limit=status is None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRunner(TurnLoopRunner):
    """A runner that plays each episode with the rollout function of the configuration."""

    function: RolloutFunction

    @classmethod
    async def start_extra_fields(cls, components: RunnerComponents) -> dict[str, Any]:
        path = components.config.rollout_function
        assert path is not None
        return {"function": import_callable(path, "environment.rollout")}

    async def play_to_end(
        self, session: AsyncSession, first_result: StepResult, seed: int, record: Conversation
    ) -> EpisodeEnd:
        try:
            end = await self.function(session, first_result, record)
        except ConversationFullError:
            return EpisodeEnd(RolloutStatus.TRUNCATED, hit_limit=True)
        except ActionError:
            if not record.num_turns:
                # The function itself chose the invalid action, not the policy.
                raise
            record.add_reward(self.limits.known_invalid_action_reward)
            return EpisodeEnd(RolloutStatus.INVALID_ACTION)
        if not isinstance(end, EpisodeEnd):
            raise TypeError(
                f"environment '{self.environment}': the rollout function must return "
                f"EpisodeEnd(status, fields), but it returned {end!r:.100}"
            )
        return end


def make_void_rollout(environment: str, seed: int, error: BaseException) -> Rollout:
    """Return the void rollout, without tokens, of an episode that `error` ended.

    Raises:
        UserError: `error` is a UserError, which all other episodes would also cause.
    """
    cause = find_first_error(error)
    if isinstance(cause, UserError):
        raise cause
    is_lost = isinstance(cause, InfrastructureError)
    status = RolloutStatus.LOST if is_lost else RolloutStatus.FAILED
    rollout = Rollout(environment, seed, (), None, None, (), status, 0, describe_error(error))
    return replace(
        rollout,
        has_agent_failed=isinstance(cause, AgentError),
        limit="tokens" if isinstance(cause, ConversationFullError) else "",
    )


def _add_record(
    rollout: Rollout, record: EpisodeRecord[Any], fields: Mapping[str, Any] | None = None
) -> PlayedEpisode:
    """Return a played episode with the tokens and messages of its record.

    A void episode has tokens too. They are counted and never trained on.
    """
    completions = [turn.completion for turn in record.turns]
    is_truncated = rollout.status is RolloutStatus.TRUNCATED
    rollout = replace(
        rollout,
        sequences=record.make_sequences(include_unanswered=is_truncated),
        policy_version=min((completion.policy_version for completion in completions), default=0),
        num_tool_calls=record.num_tool_calls,
        num_tool_calls_failed=record.num_tool_calls_failed,
        num_branches=record.num_branches,
    )
    return PlayedEpisode(
        rollout,
        prompt=record.prompt,
        completion=record.completion,
        completion_ids=[
            token_id for completion in completions for token_id in completion.token_ids
        ],
        fields=fields,
        history=record.make_transcript_turns(),
        unanswered=record.unanswered,
    )


class LastResultFields(Mapping[str, Any]):
    """Info and metadata of an episode's last result, parsed only if they are used."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    @cached_property
    def _fields(self) -> dict[str, Any]:
        return collect_result_fields(self._result)

    def __getitem__(self, key: str) -> Any:
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def collect_result_fields(result: StepResult) -> dict[str, Any]:
    """Return the info of a result and the metadata of its observation."""
    metadata = result.observation.get("metadata")
    return {**(metadata if isinstance(metadata, dict) else {}), **result.info}


async def close_session(session: AsyncSession) -> None:
    """Close the session unless an error has already closed it."""
    try:
        await session.close()
    except EnvError:
        # The server is gone, or the environment's `close` raised. Nothing is left to close.
        return


async def retry_while_full(
    open_session: Callable[[], Awaitable[_SessionT]], timeout_s: float = math.inf
) -> _SessionT:
    """Call `open_session` until the server has room, and return the opened session.

    Raises:
        CapacityError: the server had no room for `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return await open_session()
        except CapacityError:
            if time.monotonic() >= deadline_s:
                raise
            # Other episodes of this run may use all sessions. They close them when they end.
            await asyncio.sleep(_FULL_SERVER_PAUSE_S)
