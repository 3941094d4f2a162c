"""Rebuilding a lost session by replay: same seed, same actions and calls of tools, same episode.

    reset, step, call_tool --> ReplayingSession --> wire session      every answer's digest is kept
                          | SESSION_LOST, UNAVAILABLE, TIMEOUT
                          v
    open a new one (anywhere behind the address), reset on the same seed, take the same
    steps and call the same tools in their order, compare each digest, then make the call under
    which the old session was lost

An answer that differs ends the session with REPLAY_MISMATCH: an episode is never
continued on another course than the one that the policy has seen. Only for environments
that were shown deterministic, and whose tools change nothing outside their session: what such a
tool did is done once more.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import orjson

from ludus.env.encoding import DefaultSeeds, ResetArgs
from ludus.env.sessions.interface import OpenArgs
from ludus.env.transports.interface import OpenedWire, WireSession, retry_refused
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
Opener = Callable[[OpenArgs], Awaitable[OpenedWire]]

_PAUSE_S = 0.5
_DIGEST_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


@dataclass(frozen=True, slots=True)
class ResumeLimits:
    """How hard a lost session is tried to be rebuilt, for each call under which it is lost."""

    num_attempts: int = 3
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class _Played:
    """One step of the running episode."""

    action: bytes | str
    step_index: int
    digest: bytes

    async def again(self, wire: WireSession) -> bytes:
        """The digest of the same step in another session."""
        return digest_of(await wire.step(self.action, self.step_index))

    def __str__(self) -> str:
        return f"step {self.step_index}"


@dataclass(frozen=True, slots=True)
class _CalledTool:
    """One call of a tool in the running episode."""

    name: str
    arguments: JsonObject
    digest: bytes

    async def again(self, wire: WireSession) -> bytes:
        """The digest of the same call in another session."""
        return digest_of_json(await wire.call_tool(self.name, self.arguments))

    def __str__(self) -> str:
        return f"the call of tool '{self.name}'"


def check_replayable(description: EnvironmentDescription) -> None:
    """Refuse environments whose episodes cannot be rebuilt.

    Raises:
        ConfigError: the server was not shown that they can.
    """
    if not description.is_deterministic:
        raise ConfigError(
            f"expected a deterministic environment for resume = true, got"
            f" {description.name or 'one'} whose server was not shown to be that; see: ludus env"
            " check, then serve it as deterministic, or leave resume out"
        )


class ReplayingSession:
    """A wire session that is rebuilt when it is lost; its id changes then."""

    def __init__(
        self,
        open_wire: Opener,
        args: OpenArgs,
        opened: OpenedWire,
        limits: ResumeLimits,
    ) -> None:
        self.num_resumes = 0
        """How often it was rebuilt."""
        self._open_wire = open_wire
        self._args = args
        self._limits = limits
        self._wire, first = opened
        assert args.reset is not None, "what was not seeded cannot be replayed"
        assert first is not None, "a reset was asked for"
        self._reset = args.reset
        self._first_digest = digest_of(first)
        self._played: list[_Played | _CalledTool] = []

    @property
    def session_id(self) -> str:
        """The id of the session that it is now."""
        return self._wire.session_id

    @property
    def tools_session_id(self) -> str:
        """The id that calls its tools alone; another one after it was rebuilt."""
        return self._wire.tools_session_id

    async def reset(self, args: ResetArgs) -> StepResult:
        """The first result of a new episode."""
        args = DefaultSeeds().fill(args)
        try:
            first = await self._wire.reset(args)
        except InfrastructureError as error:
            first = await self._bounded(error, lambda: self._begin_again(args))
        self._reset, self._first_digest, self._played = args, digest_of(first), []
        return first

    async def step(self, action: bytes | str, step_index: int) -> StepResult:
        """The result of an action: bytes are JSON, a str is text."""
        try:
            result = await self._recorded_step(action, step_index)
        except InfrastructureError as error:

            async def again() -> StepResult:
                await self._rebuild()
                return await self._recorded_step(action, step_index)

            result = await self._bounded(error, again)
        return result

    async def state(self) -> JsonObject:
        """The environment's state."""
        try:
            return await self._wire.state()
        except InfrastructureError as error:

            async def again() -> JsonObject:
                await self._rebuild()
                return await self._wire.state()

            return await self._bounded(error, again)

    async def call_tool(self, name: str, arguments: JsonObject) -> JsonObject:
        """What a tool of the environment returned."""
        try:
            return await self._recorded_call(name, arguments)
        except InfrastructureError as error:

            async def again() -> JsonObject:
                await self._rebuild()
                return await self._recorded_call(name, arguments)

            return await self._bounded(error, again)

    async def close(self) -> None:
        """Free the session."""
        await self._wire.close()

    def abandon(self) -> None:
        """Let the server free the session, without waiting for it."""
        self._wire.abandon()

    async def _recorded_step(self, action: bytes | str, step_index: int) -> StepResult:
        """The result; a step whose code raised is kept as well: it may have changed things."""
        try:
            result = await self._wire.step(action, step_index)
        except ExecutionError as error:
            self._played.append(_Played(action, step_index, digest_of(error)))
            raise
        self._played.append(_Played(action, step_index, digest_of(result)))
        return result

    async def _recorded_call(self, name: str, arguments: JsonObject) -> JsonObject:
        """What the tool returned; a call that failed is kept, too: it may have changed things."""
        arguments = copy.deepcopy(arguments)
        try:
            result = await self._wire.call_tool(name, arguments)
        except (ToolError, ExecutionError) as error:
            self._played.append(_CalledTool(name, arguments, digest_of(error)))
            raise
        self._played.append(_CalledTool(name, arguments, digest_of_json(result)))
        return result

    async def _bounded(
        self, cause: InfrastructureError, attempt: Callable[[], Awaitable[ResultT]]
    ) -> ResultT:
        """The value of the first attempt that gets through.

        Raises:
            InfrastructureError: none did; REPLAY_MISMATCH ends it at once.
        """
        error = cause
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                for number in range(self._limits.num_attempts):
                    await asyncio.sleep(_PAUSE_S * number)
                    self._wire.abandon()
                    try:
                        return await attempt()
                    except InfrastructureError as found:
                        error = found
                    if error.code == ErrorCode.REPLAY_MISMATCH:
                        break
        except TimeoutError:
            pass
        raise error

    async def _begin_again(self, args: ResetArgs) -> StepResult:
        self._wire, first = await self._open(args)
        self.num_resumes += 1
        return first

    async def _rebuild(self) -> None:
        """Open a new session and bring it to where the lost one stood."""
        self._wire, first = await self._open(self._reset)
        self._compare("the reset", self._first_digest, digest_of(first))
        for played in self._played:
            try:
                found = await played.again(self._wire)
            except InfrastructureError:
                raise
            except EnvError as error:
                found = digest_of(error)
            self._compare(str(played), played.digest, found)
        self.num_resumes += 1

    async def _open(self, reset: ResetArgs) -> tuple[WireSession, StepResult]:
        args = dataclasses.replace(self._args, reset=reset)
        try:
            wire, first = await retry_refused(lambda: self._open_wire(args), self._limits.timeout_s)
        except (CapacityError, RateLimitError) as error:
            raise SessionLostError(
                f"session lost, and no room to rebuild it: {error.message}"
            ) from error
        assert first is not None, "a reset was asked for"
        return wire, first

    def _compare(self, what: str, expected: bytes, found: bytes) -> None:
        if found != expected:
            self._wire.abandon()
            raise SessionLostError(
                f"expected {what} on seed {self._reset.seed} to be as it was, got"
                " another answer from the new session: the environment is not deterministic, or"
                " another version of it is served; the episode is void, open a new one",
                ErrorCode.REPLAY_MISMATCH,
            )


def digest_of(outcome: StepResult | EnvError) -> bytes:
    """What two answers share exactly when a player could not tell them apart."""
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(outcome, EnvError):
        digest.update(outcome.code.encode())
        return digest.digest()
    seen = [
        outcome.observation,
        outcome.reward,
        outcome.terminated,
        outcome.truncated,
        outcome.step_index,
        outcome.success,
    ]
    digest.update(orjson.dumps(seen, option=_DIGEST_OPTIONS))
    for name, array in sorted(outcome.tensors.items()):
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.digest()


def digest_of_json(value: JsonObject) -> bytes:
    """The same for what a tool returned."""
    return hashlib.blake2b(orjson.dumps(value, option=_DIGEST_OPTIONS), digest_size=16).digest()
