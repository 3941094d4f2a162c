"""Replay of a lost session: the same seed, actions and tool calls rebuild the same episode.

    reset, step, call_tool --> ReplayingSession --> wire session      keeps a digest per response
                          | SESSION_LOST, UNAVAILABLE, TIMEOUT
                          v
    open a new session (anywhere behind the address), reset it with the same seed, repeat the same
    steps and tool calls in their order, compare each digest, then repeat the call during which the
    old session was lost

A response that differs ends the session with REPLAY_MISMATCH, so that an episode never continues
differently from what the policy has observed. Replay requires an environment that was verified as
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
from ludus.env.client.session import OpenedWire, WireSession
from ludus.env.encoding import DefaultSeeds, ResetArgs
from ludus.env.sessions.interface import OpenArgs
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult
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
OutcomeT = TypeVar("OutcomeT", StepResult, JsonObject)
Opener = Callable[[OpenArgs], Awaitable[OpenedWire]]

_PAUSE_STEP_S = 0.5
"""Pause before the second attempt to rebuild a session; each later pause is longer by the same
time."""
_DIGEST_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


@dataclass(frozen=True, slots=True)
class ResumeLimits:
    """Limits of the attempts to rebuild a lost session, per call during which it is lost."""

    num_attempts: int = 3
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class _RecordedCall:
    """A step or a tool call of the current episode."""

    name: str
    repeat: Callable[[WireSession], Awaitable[StepResult | JsonObject]]
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
    """A wire session that is rebuilt when it is lost. Its ids then change.

    `WireSession` documents its methods.
    """

    def __init__(
        self, open_wire: Opener, args: OpenArgs, opened: OpenedWire, limits: ResumeLimits
    ) -> None:
        self.num_resumes = 0
        """Number of times that the session was rebuilt."""
        self._open_wire = open_wire
        self._args = args
        self._limits = limits
        self._wire, first = opened
        assert args.reset is not None, "a session without a seed cannot be replayed"
        assert first is not None, "a reset was requested"
        self._reset = args.reset
        self._first_digest = digest_outcome(first)
        self._calls: list[_RecordedCall] = []
        """The calls of the current episode, in order."""

    @property
    def session_id(self) -> str:
        return self._wire.session_id

    @property
    def tools_session_id(self) -> str:
        return self._wire.tools_session_id

    async def reset(self, args: ResetArgs) -> StepResult:
        args = DefaultSeeds().fill(args)
        try:
            first = await self._wire.reset(args)
        except InfrastructureError as error:
            first = await self._retry(error, lambda: self._start_again(args))
        self._reset, self._first_digest, self._calls = args, digest_outcome(first), []
        return first

    async def step(self, action: bytes | str, step_index: int) -> StepResult:
        return await self._resume_on_loss(
            lambda: self._record(f"step {step_index}", lambda wire: wire.step(action, step_index))
        )

    async def state(self) -> JsonObject:
        return await self._resume_on_loss(lambda: self._wire.state())

    async def call_tool(self, name: str, arguments: JsonObject) -> JsonObject:
        arguments = copy.deepcopy(arguments)
        return await self._resume_on_loss(
            lambda: self._record(
                f"the call of tool '{name}'", lambda wire: wire.call_tool(name, arguments)
            )
        )

    async def close(self) -> None:
        await self._wire.close()

    def abandon(self) -> None:
        self._wire.abandon()

    async def _resume_on_loss(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Return the call's result. If the session is lost, rebuild it and repeat the call."""
        try:
            return await call()
        except InfrastructureError as error:

            async def rebuild_and_call() -> ResultT:
                await self._rebuild()
                return await call()

            return await self._retry(error, rebuild_and_call)

    async def _record(
        self, name: str, call: Callable[[WireSession], Awaitable[OutcomeT]]
    ) -> OutcomeT:
        """Make a call and record it. A failed call is recorded too, as it may have had effects."""
        try:
            result = await call(self._wire)
        except (ToolError, ExecutionError) as error:
            self._calls.append(_RecordedCall(name, call, digest_outcome(error)))
            raise
        self._calls.append(_RecordedCall(name, call, digest_outcome(result)))
        return result

    async def _retry(
        self, cause: InfrastructureError, attempt: Callable[[], Awaitable[ResultT]]
    ) -> ResultT:
        """Return the value of the first attempt that succeeds.

        Raises:
            InfrastructureError: every attempt failed, or one raised REPLAY_MISMATCH.
        """
        error = cause
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                for index in range(self._limits.num_attempts):
                    await asyncio.sleep(_PAUSE_STEP_S * index)
                    self._wire.abandon()
                    try:
                        return await attempt()
                    except InfrastructureError as failure:
                        error = failure
                    if error.code == ErrorCode.REPLAY_MISMATCH:
                        break
        except TimeoutError:
            pass
        raise error

    async def _start_again(self, args: ResetArgs) -> StepResult:
        self._wire, first = await self._open(args)
        self.num_resumes += 1
        return first

    async def _rebuild(self) -> None:
        """Open a new session and repeat the calls of the lost session."""
        self._wire, first = await self._open(self._reset)
        self._compare("the reset", self._first_digest, digest_outcome(first))
        for call in self._calls:
            try:
                digest = digest_outcome(await call.repeat(self._wire))
            except InfrastructureError:
                raise
            except EnvError as error:
                digest = digest_outcome(error)
            self._compare(call.name, call.digest, digest)
        self.num_resumes += 1

    async def _open(self, reset: ResetArgs) -> tuple[WireSession, StepResult]:
        args = dataclasses.replace(self._args, reset=reset)
        try:
            wire, first = await retry_refused(lambda: self._open_wire(args), self._limits.timeout_s)
        except (CapacityError, RateLimitError) as error:
            raise SessionLostError(
                f"session lost, and the server has no capacity to rebuild it: {error.message}"
            ) from error
        assert first is not None, "a reset was requested"
        return wire, first

    def _compare(self, call: str, expected: bytes, actual: bytes) -> None:
        if actual != expected:
            self._wire.abandon()
            raise SessionLostError(
                f"session lost: {call} with seed {self._reset.seed} returned a different result in"
                " the rebuilt session, because the environment is not deterministic or another"
                " version of it is served; the episode is void, open a new one",
                ErrorCode.REPLAY_MISMATCH,
            )


def digest_outcome(outcome: StepResult | JsonObject | EnvError) -> bytes:
    """Return a digest that is equal for two outcomes if a player cannot distinguish them."""
    digest = hashlib.blake2b(digest_size=16)
    visible: Any = outcome
    if isinstance(outcome, EnvError):
        visible = outcome.code
    elif isinstance(outcome, StepResult):
        visible = [
            outcome.observation,
            outcome.reward,
            outcome.terminated,
            outcome.truncated,
            outcome.step_index,
            outcome.success,
        ]
        for name, array in sorted(outcome.tensors.items()):
            digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
            digest.update(array.tobytes())
    digest.update(orjson.dumps(visible, option=_DIGEST_OPTIONS))
    return digest.digest()
