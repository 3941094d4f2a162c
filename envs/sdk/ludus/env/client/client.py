"""Clients for sessions of a remote environment. They are the same for every wire.

async with await AsyncEnvClient.connect("grpc://127.0.0.1:18000") as client:
    session, first = await client.open(seed=7)
    result = await session.step({"action_id": 1})
    result = await session.step(text="STAND")

`EnvClient` has the same calls without `await`.
"""

from __future__ import annotations

import dataclasses

from ludus.env.backoff import retry_refused
from ludus.env.client.resume import ReplayingSession, ResumeLimits, check_replayable
from ludus.env.client.session import (
    AsyncSession,
    LoopThread,
    Session,
    SessionStart,
    keep_result,
    make_synchronous,
)
from ludus.env.encoding import DefaultSeeds, ResetArgs
from ludus.env.sessions.interface import OpenArgs
from ludus.env.transports.address import ConnectOptions, RemoteServer, parse_address
from ludus.env.transports.grpc import GrpcTransport
from ludus.env.transports.openenv import OpenEnvTransport
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult
from ludus.proto.errors import InvalidCallError


class AsyncEnvClient:
    """A connection to an environment server or a gateway, with any number of sessions."""

    def __init__(self, transport: GrpcTransport | OpenEnvTransport) -> None:
        self.transport = transport

    @classmethod
    async def connect(cls, address: str, options: ConnectOptions | None = None) -> AsyncEnvClient:
        """Return a client once the server has responded.

        Args:
            address: grpc://host:port[/NAME], where NAME is an environment at a gateway;
                http://[user:token@]host:port[/path], or ws:// for the WebSocket wire. The schemes
                grpcs, https and wss use TLS. An OpenEnv 0.1 server is detected at its http://
                address and used over HTTP, with one session at a time.

        Raises:
            ConfigError: the address has an unknown scheme.
            UnavailableError: the server did not respond within `options.connect_timeout_s`.
            AuthenticationError: the token is missing or wrong.
        """
        server = RemoteServer(parse_address(address), options or ConnectOptions())
        if not server.address.is_grpc:
            return cls(await OpenEnvTransport.connect(server))
        transport = GrpcTransport(server)
        try:
            await transport.connect(server.options.connect_timeout_s)
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
            with_text: include text views in the results. False saves the time to render them.
            linger_s: time that the session outlives a broken connection. A pending call is then
                repeated on a new connection with the same step number, so that no step is taken
                twice. Gateways set a minimum.
            resume: rebuild a lost session. A new session with the same seed repeats the actions,
                and must return the same results. If no seed is set, it is random. `num_resumes`
                counts the rebuilds.
            wait_s: maximum time to retry while the server is full.

        Raises:
            CapacityError: all sessions of the server are in use.
            RateLimitError: the tenant's quota or rate is used up.
            UnavailableError: the server was unavailable for too long.
            ConfigError: `resume` is set for an environment that was not verified as deterministic,
                or `linger_s` is set on a wire whose sessions end with their connection.
        """
        reset_args = ResetArgs(seed, episode_id, options or {})
        args = OpenArgs(reset_args, close_when_done, linger_s, with_text)
        [opened_session] = await self._open(args, None, resume, wait_s)
        return opened_session

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
        """Open `size` sessions with one seed and equal first results. If one fails, open none.

        The server draws a random seed by default. The other arguments are those of `open`.

        Raises:
            CapacityError: the server did not have `size` free sessions.
            GroupMismatchError: the first results differ; all sessions are closed again.
        """
        if size < 1:
            raise InvalidCallError(f"a group must have at least 1 session, got {size}")
        reset_args = ResetArgs(seed, options=options or {})
        args = OpenArgs(reset_args, close_when_done, linger_s, with_text)
        return await self._open(args, size, resume, wait_s)

    async def open_session(self) -> AsyncSession:
        """Open a session that must be reset before its first step."""
        wire_session, _ = await self.transport.open(OpenArgs())
        return AsyncSession(wire_session, False)

    async def close(self) -> None:
        """Close the connection and all its sessions."""
        await self.transport.close()

    async def __aenter__(self) -> AsyncEnvClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _open(
        self, args: OpenArgs, group_size: int | None, resume: bool | ResumeLimits, wait_s: float
    ) -> list[tuple[AsyncSession, StepResult]]:
        if resume:
            check_replayable(await self.transport.describe())
            args = dataclasses.replace(args, reset=DefaultSeeds().fill(args.reset or ResetArgs()))

        async def attempt_open() -> list[SessionStart]:
            if group_size is None:
                return [await self.transport.open(args)]
            return [*await self.transport.open_group(args, group_size)]

        starts = await retry_refused(attempt_open, wait_s)
        return [self._make_session(start, args, resume) for start in starts]

    def _make_session(
        self, start: SessionStart, args: OpenArgs, resume: bool | ResumeLimits
    ) -> tuple[AsyncSession, StepResult]:
        wire_session, first_result = start
        assert first_result is not None, "a reset was requested"
        if resume:
            limits = resume if isinstance(resume, ResumeLimits) else ResumeLimits()
            wire_session = ReplayingSession(self.transport.open, args, start, limits)
        return AsyncSession(wire_session, args.close_when_done), first_result


def _wrap_session(
    opened_session: tuple[AsyncSession, StepResult], loop_thread: LoopThread
) -> tuple[Session, StepResult]:
    session, first_result = opened_session
    return Session(session, loop_thread), first_result


def _wrap_group(
    group: list[tuple[AsyncSession, StepResult]], loop_thread: LoopThread
) -> list[tuple[Session, StepResult]]:
    return [_wrap_session(opened_session, loop_thread) for opened_session in group]


class EnvClient:
    """A connection to an environment server or a gateway, with any number of sessions.

    Its methods have the arguments of the methods of `AsyncEnvClient`.
    """

    def __init__(self, async_counterpart: AsyncEnvClient, loop_thread: LoopThread) -> None:
        self.async_counterpart = async_counterpart
        self.loop_thread = loop_thread

    @classmethod
    def connect(cls, address: str, options: ConnectOptions | None = None) -> EnvClient:
        """Return a client once the server has responded; see `AsyncEnvClient.connect`."""
        loop_thread = LoopThread()
        try:
            return cls(loop_thread.run(AsyncEnvClient.connect(address, options)), loop_thread)
        except BaseException:
            loop_thread.stop()
            raise

    describe = make_synchronous(AsyncEnvClient.describe, keep_result)
    open = make_synchronous(AsyncEnvClient.open, _wrap_session)
    open_group = make_synchronous(AsyncEnvClient.open_group, _wrap_group)
    open_session = make_synchronous(AsyncEnvClient.open_session, Session)

    def close(self) -> None:
        """Close the connection and all its sessions, except in a forked process."""
        if not self.loop_thread.is_copy:
            self.loop_thread.run(self.async_counterpart.close())
        self.loop_thread.stop()

    def __enter__(self) -> EnvClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
