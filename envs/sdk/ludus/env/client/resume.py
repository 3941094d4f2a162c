"""Replay of a lost session: the same seed, actions and tool calls rebuild the same episode.

    reset, step, call_tool --> ReplayingSession --> wire session      stores a digest per response
                          | SESSION_LOST, UNAVAILABLE, TIMEOUT
                          v
    open a new session (anywhere behind the address), reset it with the same seed, repeat the same
    steps and tool calls in their order, compare each digest, then repeat the call during which the
    old session was lost

A different response ends the session with REPLAY_MISMATCH, so that an episode never continues from
observations that the policy has not seen. Replay requires an environment that was verified as
deterministic. Its tools must not change anything outside the session, because they run again.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from ludus.env.backoff import retry_refused
from ludus.env.client.session import SessionStart, WireSession
from ludus.env.encoding import DefaultSeeds, ResetArgs
from ludus.env.sessions.interface import OpenArgs
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult, ToolResult
from ludus.proto.errors import (
    CapacityError,
    ConfigError,
    EnvError,
    ErrorCode,
    ExecutionError,
    InfrastructureError,
    RateLimitError,
    SessionLostError,
    ToolError,
)

ResultT = TypeVar("ResultT")
OutcomeT = TypeVar("OutcomeT", StepResult, ToolResult)
OpenSession = Callable[[OpenArgs], Awaitable[SessionStart]]

_PAUSE_INCREMENT_S = 0.5
"""Increase of the pause with each attempt to rebuild a session. The first attempt has no pause."""
_VISIBLE_FIELDS = ("observation", "reward", "terminated", "truncated", "step_index", "success")
_DIGEST_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


@dataclass(frozen=True, slots=True)
class ResumeLimits:
    """Limits on the attempts to rebuild a session, for each call during which it is lost."""

    num_attempts: int = 3
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class _RecordedCall:
    """A step or a tool call of the current episode."""

    call_name: str
    repeat: Callable[[WireSession], Awaitable[StepResult | ToolResult]]
    """Makes the call in a session."""
    digest: bytes
    """Digest of the result or error."""


def check_replayable(description: EnvironmentDescription) -> None:
    """Check that an environment's episodes can be rebuilt.

    Raises:
        ConfigError: the server does not declare the environment as deterministic.
    """
    if not description.is_deterministic:
        name = f"'{description.name}'" if description.name else "the environment"
        raise ConfigError(
            f"resume = true needs a deterministic environment, and the server does not declare"
            f" {name} as deterministic; verify it with: ludus env check, then serve it as"
            " deterministic, or remove resume"
        )


class ReplayingSession:
    """A wire session that is rebuilt when it is lost. The ids of the rebuilt session are new.

    `WireSession` documents its methods.
    """

    def __init__(
        self, open_session: OpenSession, args: OpenArgs, start: SessionStart, limits: ResumeLimits
    ) -> None:
        self.num_resumes = 0
        """Number of times that the session was rebuilt."""
        self._open_session = open_session
        self._args = args
        self._limits = limits
        self._wire_session, first_result = start
        assert args.reset is not None, "a session without a seed cannot be replayed"
        assert first_result is not None, "a reset was requested"
        self._reset_args = args.reset
        self._first_digest = digest_outcome(first_result)
        self._calls: list[_RecordedCall] = []
        """The calls of the current episode, in order."""

    @property
    def session_id(self) -> str:
        return self._wire_session.session_id

    @property
    def tools_session_id(self) -> str:
        return self._wire_session.tools_session_id

    async def reset(self, args: ResetArgs) -> StepResult:
        args = DefaultSeeds().fill(args)
        try:
            first_result = await self._wire_session.reset(args)
        except InfrastructureError as error:
            first_result = await self._retry(error, lambda: self._open_and_reset(args))
        self._reset_args, self._first_digest, self._calls = args, digest_outcome(first_result), []
        return first_result

    async def step(self, action: bytes | str, step_index: int) -> StepResult:
        return await self._resume_on_loss(
            lambda: self._record_call(
                f"step {step_index}", lambda wire_session: wire_session.step(action, step_index)
            )
        )

    async def state(self) -> JsonObject:
        return await self._resume_on_loss(lambda: self._wire_session.state())

    async def call_tool(self, name: str, arguments: JsonObject) -> ToolResult:
        arguments = copy.deepcopy(arguments)
        return await self._resume_on_loss(
            lambda: self._record_call(
                f"the call of tool '{name}'",
                lambda wire_session: wire_session.call_tool(name, arguments),
            )
        )

    async def close(self) -> None:
        await self._wire_session.close()

    def abandon(self) -> None:
        self._wire_session.abandon()

    async def _resume_on_loss(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Return the call's result. If the session is lost, rebuild it and repeat the call."""
        try:
            return await call()
        except InfrastructureError as error:

            async def rebuild_and_call() -> ResultT:
                await self._rebuild()
                return await call()

            return await self._retry(error, rebuild_and_call)

    async def _record_call(
        self, call_name: str, call: Callable[[WireSession], Awaitable[OutcomeT]]
    ) -> OutcomeT:
        """Make a call and record it, even if it fails, because it may have had effects."""
        try:
            result = await call(self._wire_session)
        except (ToolError, ExecutionError) as error:
            self._calls.append(_RecordedCall(call_name, call, digest_outcome(error)))
            raise
        self._calls.append(_RecordedCall(call_name, call, digest_outcome(result)))
        return result

    async def _retry(
        self, first_error: InfrastructureError, attempt_call: Callable[[], Awaitable[ResultT]]
    ) -> ResultT:
        """Return the result of the first attempt that succeeds.

        Raises:
            InfrastructureError: every attempt failed, or one raised REPLAY_MISMATCH.
        """
        error = first_error
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                for attempt_index in range(self._limits.num_attempts):
                    await asyncio.sleep(_PAUSE_INCREMENT_S * attempt_index)
                    self._wire_session.abandon()
                    try:
                        return await attempt_call()
                    except InfrastructureError as failure:
                        error = failure
                    if error.code == ErrorCode.REPLAY_MISMATCH:
                        break
        except TimeoutError:
            pass
        raise error

    async def _open_and_reset(self, args: ResetArgs) -> StepResult:
        self._wire_session, first_result = await self._open(args)
        self.num_resumes += 1
        return first_result

    async def _rebuild(self) -> None:
        """Open a new session and repeat the calls of the lost session."""
        self._wire_session, first_result = await self._open(self._reset_args)
        self._require_equal("the reset", self._first_digest, digest_outcome(first_result))
        for call in self._calls:
            try:
                digest = digest_outcome(await call.repeat(self._wire_session))
            except InfrastructureError:
                raise
            except EnvError as error:
                digest = digest_outcome(error)
            self._require_equal(call.call_name, call.digest, digest)
        self.num_resumes += 1

    async def _open(self, reset_args: ResetArgs) -> tuple[WireSession, StepResult]:
        args = dataclasses.replace(self._args, reset=reset_args)
        try:
            wire_session, first_result = await retry_refused(
                lambda: self._open_session(args), self._limits.timeout_s
            )
        except (CapacityError, RateLimitError) as error:
            raise SessionLostError(
                f"session lost, and the server has no capacity to rebuild it: {error.message}"
            ) from error
        assert first_result is not None, "a reset was requested"
        return wire_session, first_result

    def _require_equal(self, call_name: str, expected_digest: bytes, actual_digest: bytes) -> None:
        if actual_digest != expected_digest:
            self._wire_session.abandon()
            raise SessionLostError(
                f"session lost: {call_name} with seed {self._reset_args.seed} returned a different"
                " result in the rebuilt session, because the environment is not deterministic or"
                " another version of it is served; the episode is void, open a new one",
                ErrorCode.REPLAY_MISMATCH,
            )


def digest_outcome(outcome: StepResult | ToolResult | EnvError) -> bytes:
    """Return a digest that is equal for two outcomes if a player cannot distinguish them."""
    hasher = hashlib.blake2b(digest_size=16)
    visible_content: Any = outcome
    if isinstance(outcome, EnvError):
        visible_content = outcome.code
    elif isinstance(outcome, ToolResult):
        visible_content = dataclasses.astuple(outcome)
    elif isinstance(outcome, StepResult):
        visible_content = [getattr(outcome, name) for name in _VISIBLE_FIELDS]
        for name, array in sorted(outcome.tensors.items()):
            hasher.update(f"{name} {array.dtype.name} {array.shape}".encode())
            hasher.update(array.tobytes())
    hasher.update(orjson.dumps(visible_content, option=_DIGEST_OPTIONS))
    return hasher.digest()
