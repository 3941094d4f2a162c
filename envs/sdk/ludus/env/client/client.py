"""The asynchronous client for sessions of a remote environment, the same over every wire.

async with await AsyncEnvClient.connect("grpc://127.0.0.1:18000") as client:
    session, first = await client.open(seed=7)
    result = await session.step({"action_id": 1})
    result = await session.step(text="STAND")
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from ludus.env.client.resume import ReplayingSession, ResumeLimits, check_replayable
from ludus.env.encoding import DefaultSeeds, ResetArgs, plain_json, unwritable_error
from ludus.env.sessions.interface import OpenArgs
from ludus.env.transports.address import parse_address
from ludus.env.transports.discovery import HttpClient
from ludus.env.transports.grpc import GrpcTransport
from ludus.env.transports.interface import (
    ConnectOptions,
    OpenedWire,
    RemoteServer,
    Transport,
    WireSession,
    retry_refused,
    retry_unavailable,
)
from ludus.env.transports.openenv_01 import LegacyHttpTransport
from ludus.env.transports.websocket import WebSocketTransport
from ludus.env.types import Action, EnvironmentDescription, JsonObject, StepResult
from ludus.proto.errors import (
    EpisodeStateError,
    ErrorCode,
    InfrastructureError,
    InvalidCallError,
    SessionLostError,
)


class AsyncEnvClient:
    """A connection to an environment server or a gateway, with any number of sessions."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    @classmethod
    async def connect(cls, address: str, options: ConnectOptions | None = None) -> AsyncEnvClient:
        """Return a client once the server has responded.

        Args:
            address: grpc://host:port[/NAME], where NAME is an environment at a gateway;
                http://[user:token@]host:port[/path], or ws:// for the WebSocket wire; or grpcs,
                https and wss with TLS. An OpenEnv 0.1 server is detected at its http:// address
                and used over HTTP, with one session at a time.

        Raises:
            ConfigError: the address has an unknown scheme.
            UnavailableError: the server did not respond within `options.connect_timeout_s`.
            AuthenticationError: the token is missing or wrong.
        """
        server = RemoteServer(parse_address(address), options or ConnectOptions())
        timeout_s = server.options.connect_timeout_s
        transport = await _make_transport(server, timeout_s)
        try:
            await transport.connect(timeout_s)
        except BaseException:
            await transport.close()
            raise
        return cls(transport)

    async def describe(self) -> EnvironmentDescription:
        """Return the server's description of its environment."""
        return await self.transport.describe()

    async def open(
        self,
        *,
        seed: int | None = None,
        options: JsonObject | None = None,
        episode_id: str = "",
        close_when_done: bool = False,
        with_text: bool = True,
        linger_s: float = 0.0,
        resume: bool | ResumeLimits = False,
        wait_s: float = 0.0,
    ) -> tuple[AsyncSession, StepResult]:
        """Open a session, and return it with the first result of its first episode.

        Args:
            close_when_done: close the session as soon as the episode has ended.
            with_text: False leaves text views out of results, which saves rendering them.
            linger_s: how long the session outlives a broken connection. A pending call is then
                repeated on a new connection with the same step number, so that nothing is done
                twice. Gateways set a minimum.
            resume: rebuild a lost session in a new one with the same seed (a random seed if none
                is set) and the same actions, and compare the results. `num_resumes` counts the
                rebuilds.
            wait_s: how long to retry when the server is full.

        Raises:
            CapacityError: all sessions of the server are in use.
            RateLimitError: the tenant's quota or rate is used up.
            UnavailableError: the server was unavailable for too long.
            ConfigError: `resume` is set for an environment that was not verified as deterministic,
                or `linger_s` on a wire whose sessions end with their connection.
        """
        args = OpenArgs(
            reset=ResetArgs(seed, episode_id, options or {}),
            close_when_done=close_when_done,
            linger_s=linger_s,
            with_text=with_text,
        )
        if resume:
            args = await self._require_replayable(args)
        opened = await retry_refused(lambda: self.transport.open(args), wait_s)
        return self._make_session(opened, args, resume)

    async def open_group(
        self,
        size: int,
        *,
        seed: int | None = None,
        options: JsonObject | None = None,
        close_when_done: bool = False,
        with_text: bool = True,
        linger_s: float = 0.0,
        resume: bool | ResumeLimits = False,
        wait_s: float = 0.0,
    ) -> list[tuple[AsyncSession, StepResult]]:
        """Open `size` sessions with one seed and equal first results, or none of them.

        The server draws a random seed by default. The other arguments are those of `open`.

        Raises:
            CapacityError: the server did not have `size` free sessions.
            GroupMismatchError: the first results differ; all sessions are closed again.
        """
        if size < 1:
            raise InvalidCallError(f"a group must have at least 1 session, got {size}")
        args = OpenArgs(
            reset=ResetArgs(seed, options=options or {}),
            close_when_done=close_when_done,
            linger_s=linger_s,
            with_text=with_text,
        )
        if resume:
            args = await self._require_replayable(args)
        group = await retry_refused(lambda: self.transport.open_group(args, size), wait_s)
        return [self._make_session(opened, args, resume) for opened in group]

    async def open_session(self) -> AsyncSession:
        """Open a session that must be reset before its first step."""
        wire, _ = await self.transport.open(OpenArgs())
        return AsyncSession(wire, False)

    async def close(self) -> None:
        """Close the connection and all its sessions."""
        await self.transport.close()

    async def __aenter__(self) -> AsyncEnvClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _require_replayable(self, args: OpenArgs) -> OpenArgs:
        check_replayable(await self.transport.describe())
        return dataclasses.replace(args, reset=DefaultSeeds().fill(args.reset or ResetArgs()))

    def _make_session(
        self, opened: OpenedWire, args: OpenArgs, resume: bool | ResumeLimits
    ) -> tuple[AsyncSession, StepResult]:
        wire, first = opened
        assert first is not None, "a reset was requested"
        if resume:
            limits = resume if isinstance(resume, ResumeLimits) else ResumeLimits()
            wire = ReplayingSession(self.transport.open, args, opened, limits)
        return AsyncSession(wire, args.close_when_done), first


class AsyncSession:
    """One session of a remote environment, with one call at a time.

    Steps are numbered, so that the client can repeat a step without taking it twice. A call that
    is cancelled or times out ends the session, because its effect is unknown.
    """

    __slots__ = ("_busy", "_close_when_done", "_gone", "_step_index", "wire")

    def __init__(self, wire: WireSession, close_when_done: bool) -> None:
        self.wire = wire
        """The session on the wire, for calls that choose their own step number."""
        self._close_when_done = close_when_done
        self._step_index = 0
        self._busy = False
        self._gone: str | None = None

    @property
    def id(self) -> str:
        """The session's id on the server. It changes when the session is rebuilt."""
        return self.wire.session_id

    @property
    def tools_id(self) -> str:
        """The id for an agent, which can only call the session's tools.

        Empty if the environment has no tools, or its server does not support such ids.
        """
        return self.wire.tools_session_id

    @property
    def step_index(self) -> int:
        """The number of steps taken in this episode."""
        return self._step_index

    @property
    def num_resumes(self) -> int:
        """The number of times that the session was lost and rebuilt by replay."""
        return self.wire.num_resumes if isinstance(self.wire, ReplayingSession) else 0

    async def reset(
        self,
        *,
        seed: int | None = None,
        options: JsonObject | None = None,
        episode_id: str = "",
    ) -> StepResult:
        """Start a new episode and return its first result."""
        self._begin()
        try:
            outcome = await self.wire.reset(ResetArgs(seed, episode_id, options or {}))
        except BaseException as error:
            self._end_step(error)
            raise
        self._end_step(outcome)
        return outcome

    async def step(
        self, action: Action | JsonObject | None = None, *, text: str | None = None
    ) -> StepResult:
        """Return the result of an action, which is JSON or a language model's text.

        Raises:
            ActionError: the action is invalid; the episode is unchanged.
            InfrastructureError: the session has ended and its episode is void.
        """
        if (action is None) == (text is None):
            raise InvalidCallError("expected either an action or a text, got both or neither")
        encoded = encode_action(action if text is None else text)
        self._begin()
        try:
            result = await self.wire.step(encoded, self._step_index + 1)
        except BaseException as error:
            self._end_step(error)
            raise
        self._end_step(result)
        return result

    async def state(self) -> JsonObject:
        """Return the environment's state."""
        self._begin()
        try:
            return await self.wire.state()
        except BaseException as error:
            self._drop_on(error)
            raise
        finally:
            self._busy = False

    async def call_tool(self, name: str, arguments: JsonObject | None = None) -> JsonObject:
        """Call a tool of the environment and return its result; the episode takes no step.

        Raises:
            ToolError: there is no such tool, or it failed; the episode continues.
            InfrastructureError: the session has ended and its episode is void.
        """
        self._begin()
        try:
            return await self.wire.call_tool(name, arguments or {})
        except BaseException as error:
            self._drop_on(error)
            raise
        finally:
            self._busy = False

    async def close(self) -> None:
        """Close the session. Closing a session that has ended is not an error."""
        if self._gone is None:
            self._gone = "it was closed"
            with contextlib.suppress(SessionLostError):
                await self.wire.close()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _begin(self) -> None:
        if self._gone is not None:
            raise SessionLostError(f"session {self.id!r} has ended: {self._gone}; open a new one")
        if self._busy:
            raise EpisodeStateError(
                f"session {self.id!r} got a second call while the first is pending; await the"
                " first call",
                ErrorCode.STEP_CONFLICT,
            )
        self._busy = True

    def _end_step(self, outcome: StepResult | BaseException) -> None:
        self._busy = False
        if not isinstance(outcome, StepResult):
            self._drop_on(outcome)
            return
        self._step_index = outcome.step_index
        if self._close_when_done and outcome.done:
            self._gone = "its episode ended and it was opened with close_when_done"

    def _drop_on(self, error: BaseException) -> None:
        if isinstance(error, InfrastructureError):
            self._gone = error.message.removesuffix("; open a new one")
        elif isinstance(error, asyncio.CancelledError):
            self._gone = "a pending call was cancelled"
        else:
            return
        self.wire.abandon()


def encode_action(action: Action | JsonObject | str | None) -> bytes | str:
    """Return a text unchanged, and any other action as JSON bytes.

    Raises:
        InvalidCallError: the action cannot be encoded.
    """
    if isinstance(action, Action):
        try:
            return action.__pydantic_serializer__.to_json(action)
        except ValueError as error:
            raise unwritable_error("an action", error) from None
    if isinstance(action, str):
        try:
            action.encode()
        except UnicodeEncodeError as error:
            raise unwritable_error("a text", error) from None
        return action
    return plain_json(action, "an action")


async def _make_transport(server: RemoteServer, timeout_s: float) -> Transport:
    """Return the transport for the address. An http:// server is queried for its protocol."""
    if server.address.is_grpc:
        return GrpcTransport(server)
    discovered = await retry_unavailable(HttpClient(server).discover, timeout_s)
    if discovered.is_legacy and not server.address.is_websocket:
        return LegacyHttpTransport(server, discovered)
    return WebSocketTransport(server, discovered)
