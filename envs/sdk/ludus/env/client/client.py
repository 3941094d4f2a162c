"""The clients for sessions of a remote environment, the same over every wire.

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
    OpenedWire,
    Session,
    keep,
    synchronous,
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
                http://[user:token@]host:port[/path], or ws:// for the WebSocket wire; or grpcs,
                https and wss with TLS. An OpenEnv 0.1 server is detected at its http:// address
                and used over HTTP, with one session at a time.

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
        [opened] = await self._open(args, None, resume, wait_s)
        return opened

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
        return await self._open(args, size, resume, wait_s)

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

    async def _open(
        self, args: OpenArgs, group_size: int | None, resume: bool | ResumeLimits, wait_s: float
    ) -> list[tuple[AsyncSession, StepResult]]:
        if resume:
            check_replayable(await self.transport.describe())
            args = dataclasses.replace(args, reset=DefaultSeeds().fill(args.reset or ResetArgs()))

        async def attempt() -> list[OpenedWire]:
            if group_size is None:
                return [await self.transport.open(args)]
            return [*await self.transport.open_group(args, group_size)]

        return [
            self._make_session(opened, args, resume)
            for opened in await retry_refused(attempt, wait_s)
        ]

    def _make_session(
        self, opened: OpenedWire, args: OpenArgs, resume: bool | ResumeLimits
    ) -> tuple[AsyncSession, StepResult]:
        wire, first = opened
        assert first is not None, "a reset was requested"
        if resume:
            limits = resume if isinstance(resume, ResumeLimits) else ResumeLimits()
            wire = ReplayingSession(self.transport.open, args, opened, limits)
        return AsyncSession(wire, args.close_when_done), first


def _make_opened(
    opened: tuple[AsyncSession, StepResult], loop: LoopThread
) -> tuple[Session, StepResult]:
    session, first_result = opened
    return Session(session, loop), first_result


def _make_group(
    group: list[tuple[AsyncSession, StepResult]], loop: LoopThread
) -> list[tuple[Session, StepResult]]:
    return [_make_opened(opened_session, loop) for opened_session in group]


class EnvClient:
    """A connection to an environment server or a gateway, with any number of sessions.

    Its methods have the arguments of the methods of `AsyncEnvClient`.
    """

    def __init__(self, asynchronous: AsyncEnvClient, loop: LoopThread) -> None:
        self.asynchronous = asynchronous
        self.loop = loop

    @classmethod
    def connect(cls, address: str, options: ConnectOptions | None = None) -> EnvClient:
        """Return a client once the server has responded; see `AsyncEnvClient.connect`."""
        loop = LoopThread()
        try:
            return cls(loop.run(AsyncEnvClient.connect(address, options)), loop)
        except BaseException:
            loop.stop()
            raise

    describe = synchronous(AsyncEnvClient.describe, keep)
    open = synchronous(AsyncEnvClient.open, _make_opened)
    open_group = synchronous(AsyncEnvClient.open_group, _make_group)
    open_session = synchronous(AsyncEnvClient.open_session, Session)

    def close(self) -> None:
        """Close the connection and all its sessions."""
        self.loop.run(self.asynchronous.close())
        self.loop.stop()

    def __enter__(self) -> EnvClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
