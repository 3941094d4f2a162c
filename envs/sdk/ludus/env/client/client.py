"""The asynchronous client: sessions of a remote environment, the same over every wire.

async with await AsyncEnvClient.connect("grpc://127.0.0.1:18000") as client:
    session, first = await client.open(seed=7)
    result = await session.step({"action_id": 1})
    result = await session.step(text="STAND")
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

from ludus.env.client.resume import ReplayingSession, ResumeLimits, check_replayable
from ludus.env.encoding import DefaultSeeds, ResetArgs, plain_json, unwritable
from ludus.env.sessions.interface import OpenArgs
from ludus.env.transports.address import parse_address
from ludus.env.transports.discovery import HttpClient
from ludus.env.transports.grpc import GrpcTransport
from ludus.env.transports.interface import (
    ConnectOptions,
    OpenedWire,
    StepCall,
    Transport,
    WireSession,
    retry_refused,
    retry_until,
    step_or_error,
)
from ludus.env.transports.openenv_01 import LegacyHttpTransport
from ludus.env.transports.websocket import WebSocketTransport
from ludus.env.types import Action, EnvironmentDescription, JsonObject, StepResult
from ludus.proto.errors import (
    EnvError,
    EpisodeStateError,
    ErrorCode,
    InfrastructureError,
    InvalidCallError,
    SessionLostError,
)

Reset: TypeAlias = ResetArgs
"""In a `step_many`, starts a session's next episode: `Reset(seed=..., options=...)`."""


class AsyncEnvClient:
    """A connection to an environment server or a gateway; opens any number of sessions."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._num_resuming = 0

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        connect_timeout_s: float = 10.0,
        reconnect_timeout_s: float = 60.0,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        server_name: str | None = None,
        keepalive_s: float = 10.0,
        allow_ignored_seed: bool = False,
        max_calls_per_message: int = 0,
    ) -> AsyncEnvClient:
        """A client whose server has answered.

        Args:
            address: grpc://host:port[/NAME], where NAME is an environment at a gateway; or
                http://[user:token@]host:port[/path] or ws:// for the WebSocket wire; grpcs,
                https and wss with TLS. An OpenEnv 0.1 server is recognised at its http://
                address and driven by HTTP, one session at a time.
            timeout_s: for one call; a call that takes longer drops its session.
            reconnect_timeout_s: how long `open`, and calls of sessions that survive a broken
                connection, wait for a server that went away.
            ca_file: PEM certificates that a TLS server's may come from; else the system's.
            cert_file: the PEM certificate for servers that ask for one; its key is `key_file`.
            server_name: what a TLS server's certificate names, if not the address's host.
            keepalive_s: a gRPC connection that is silent for so long is asked for a sign of life,
                and given up when it stays silent for as long again.
            allow_ignored_seed: lets seeds be given to OpenEnv 0.1 servers, which ignore them:
                episodes cannot be repeated then. Without it such a seed is a ConfigError.
            max_calls_per_message: over gRPC; 0 sends all calls that gather in one message.

        Raises:
            ConfigError: the address has no known scheme.
            UnavailableError: the server did not answer within `connect_timeout_s`.
            AuthenticationError: the token is missing or wrong.
        """
        options = ConnectOptions(
            address=parse_address(address),
            token=token,
            timeout_s=timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
            server_name=server_name,
            keepalive_s=keepalive_s,
            allow_ignored_seed=allow_ignored_seed,
            max_calls_per_message=max_calls_per_message,
        )
        transport = await _transport_for(options, connect_timeout_s)
        try:
            await transport.connect(connect_timeout_s)
        except BaseException:
            await transport.close()
            raise
        return cls(transport)

    async def describe(self) -> EnvironmentDescription:
        """What the server says of its environment."""
        return await self._transport.describe()

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
        """A new session and the first result of its first episode.

        Args:
            close_when_done: frees the session as soon as the episode has ended.
            with_text: False leaves text views out of results, which saves rendering them.
            linger_s: how long the session lives on when the connection breaks. A call in
                flight is then made again on a new connection, under the same step number,
                so that nothing is done twice. Gateways grant a time of their own at least.
            resume: a session that is lost is rebuilt in a new one: same seed (one is drawn
                where none is given), same actions, answers compared; `num_resumes` counts.
            wait_s: how long to come back to a server that is full, until it has room.

        Raises:
            CapacityError: all sessions of the server are taken.
            RateLimitError: the tenant's quota or rate is used up.
            UnavailableError: the server is unavailable and did not come back in time.
            ConfigError: `resume`, and the environment was not shown deterministic; or
                `linger_s` on a wire whose sessions end with their connection.
        """
        args = OpenArgs(
            reset=ResetArgs(seed, episode_id, options or {}),
            close_when_done=close_when_done,
            linger_s=linger_s,
            with_text=with_text,
        )
        if resume:
            args = await self._replayable(args)
        opened = await retry_refused(lambda: self._transport.open(args), wait_s)
        return self._session(opened, args, resume)

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
        """`size` sessions on one seed, all or none, whose first results are the same.

        The server draws a seed where none is given; the other arguments are those of `open`.

        Raises:
            CapacityError: so many sessions did not become free together.
            GroupMismatchError: they begin differently; all are closed again.
        """
        if size < 1:
            raise InvalidCallError(f"expected a group of at least 1 session, got {size}")
        args = OpenArgs(
            reset=ResetArgs(seed, options=options or {}),
            close_when_done=close_when_done,
            linger_s=linger_s,
            with_text=with_text,
        )
        if resume:
            args = await self._replayable(args)
        group = await retry_refused(lambda: self._transport.open_group(args, size), wait_s)
        return [self._session(opened, args, resume) for opened in group]

    async def open_session(self) -> AsyncSession:
        """A new session, to be reset before its first step."""
        wire, _ = await self._transport.open(OpenArgs())
        return AsyncSession(wire, False)

    async def step_many(
        self, steps: Sequence[tuple[AsyncSession, Action | JsonObject | str | Reset]]
    ) -> list[StepResult | EnvError]:
        """One result or error per step, in order.

        A str is text, a `Reset` starts the session's next episode, anything else is an
        action.
        """
        outcomes: list[StepResult | EnvError | None] = [None] * len(steps)
        begun: list[tuple[int, AsyncSession]] = []
        calls: list[StepCall] = []
        for index, (session, action) in enumerate(steps):
            try:
                calls.append(session._begin_step(encode_action(action)))
                begun.append((index, session))
            except EnvError as error:
                outcomes[index] = error
        try:
            answers = await self._step_many(calls)
        except BaseException as error:
            for _, session in begun:
                session._end_step(error)
            raise
        for (index, session), answer in zip(begun, answers, strict=True):
            session._end_step(answer)
            outcomes[index] = answer
        return [outcome for outcome in outcomes if outcome is not None]

    async def close(self) -> None:
        """End the connection and with it all its sessions."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncEnvClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _step_many(self, calls: Sequence[StepCall]) -> list[StepResult | EnvError]:
        """One outcome per call; sessions that can be rebuilt make their calls themselves."""
        if not self._num_resuming:
            return await self._transport.step_many(calls)
        together = [c for c in calls if not isinstance(c.session, ReplayingSession)]
        alone = [c for c in calls if isinstance(c.session, ReplayingSession)]
        joint, single = await asyncio.gather(
            self._transport.step_many(together),
            asyncio.gather(*(step_or_error(call) for call in alone)),
        )
        outcome_of = {call.session: outcome for call, outcome in zip(together, joint, strict=True)}
        outcome_of |= {call.session: outcome for call, outcome in zip(alone, single, strict=True)}
        return [outcome_of[call.session] for call in calls]

    async def _replayable(self, args: OpenArgs) -> OpenArgs:
        check_replayable(await self._transport.describe())
        return dataclasses.replace(args, reset=DefaultSeeds().fill(args.reset or ResetArgs()))

    def _session(
        self, opened: OpenedWire, args: OpenArgs, resume: bool | ResumeLimits
    ) -> tuple[AsyncSession, StepResult]:
        wire, first = opened
        assert first is not None, "a reset was asked for"
        if resume:
            limits = resume if isinstance(resume, ResumeLimits) else ResumeLimits()
            wire = ReplayingSession(self._transport.open, args, opened, limits)
            self._num_resuming += 1
        return AsyncSession(wire, args.close_when_done), first


class AsyncSession:
    """One session of a remote environment; one call at a time.

    Steps are numbered, so that a step can be repeated without being taken twice. A call
    that is cancelled or times out drops the session: nobody knows how far it got.
    """

    __slots__ = ("_busy", "_close_when_done", "_gone", "_step_index", "_wire")

    def __init__(self, wire: WireSession, close_when_done: bool) -> None:
        self._wire = wire
        self._close_when_done = close_when_done
        self._step_index = 0
        self._busy = False
        self._gone: str | None = None

    @property
    def id(self) -> str:
        """The session's id on the server; another one after it was rebuilt."""
        return self._wire.session_id

    @property
    def tools_id(self) -> str:
        """The id to give to an agent: it may call the session's tools and nothing else.

        Empty where the environment has no tools, or its server hands out no such ids.
        """
        return self._wire.tools_session_id

    @property
    def step_index(self) -> int:
        """Steps taken in this episode."""
        return self._step_index

    @property
    def num_resumes(self) -> int:
        """How often it was lost and rebuilt by replay."""
        return self._wire.num_resumes if isinstance(self._wire, ReplayingSession) else 0

    async def reset(
        self,
        *,
        seed: int | None = None,
        options: JsonObject | None = None,
        episode_id: str = "",
    ) -> StepResult:
        """The first result of a new episode."""
        self._begin()
        try:
            outcome = await self._wire.reset(ResetArgs(seed, episode_id, options or {}))
        except BaseException as error:
            self._end_step(error)
            raise
        self._end_step(outcome)
        return outcome

    async def step(
        self, action: Action | JsonObject | None = None, *, text: str | None = None
    ) -> StepResult:
        """The result of an action, given as JSON or as a language model's text.

        Raises:
            ActionError: the action cannot be taken; the episode is unchanged.
            InfrastructureError: the session is gone and its episode void.
        """
        if (action is None) == (text is None):
            raise InvalidCallError("expected an action or a text, got both or neither")
        encoded = encode_action(action if text is None else text)
        self._begin()
        try:
            result = await self._wire.step(encoded, self._step_index + 1)
        except BaseException as error:
            self._end_step(error)
            raise
        self._end_step(result)
        return result

    async def state(self) -> JsonObject:
        """The environment's state."""
        self._begin()
        try:
            return await self._wire.state()
        except BaseException as error:
            self._drop_on(error)
            raise
        finally:
            self._busy = False

    async def call_tool(self, name: str, arguments: JsonObject | None = None) -> JsonObject:
        """What a tool of the environment returned; the episode takes no step.

        Raises:
            ToolError: there is no such tool, or it failed; the episode continues.
            InfrastructureError: the session is gone and its episode void.
        """
        self._begin()
        try:
            return await self._wire.call_tool(name, arguments or {})
        except BaseException as error:
            self._drop_on(error)
            raise
        finally:
            self._busy = False

    async def close(self) -> None:
        """Frees the session; one that is gone already is no error."""
        if self._gone is None:
            self._gone = "it was closed"
            with contextlib.suppress(SessionLostError):
                await self._wire.close()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _begin(self) -> None:
        if self._gone is not None:
            raise SessionLostError(f"session {self.id!r} is gone: {self._gone}; open a new one")
        if self._busy:
            raise EpisodeStateError(
                f"expected one call at a time, got a second one for session {self.id!r};"
                " await the first",
                ErrorCode.STEP_CONFLICT,
            )
        self._busy = True

    def _begin_step(self, action: bytes | str | ResetArgs) -> StepCall:
        self._begin()
        return StepCall(self._wire, action, self._step_index + 1)

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
            self._gone = error.message
        elif isinstance(error, asyncio.CancelledError):
            self._gone = "a call was cancelled half-way"
        else:
            return
        self._wire.abandon()


def encode_action(action: Any) -> Any:
    """What travels for an action: a text or a reset as it is, anything else as JSON bytes.

    Raises:
        InvalidCallError: no wire can carry it. Said here, it is said of this action alone: many
            may travel as one call.
    """
    if isinstance(action, Action):
        try:
            return action.__pydantic_serializer__.to_json(action)
        except ValueError as error:
            raise unwritable("an action", error) from None
    if isinstance(action, str):
        try:
            action.encode()
        except UnicodeEncodeError as error:
            raise unwritable("a text", error) from None
        return action
    if isinstance(action, ResetArgs):
        plain_json(action.options, "reset options")
        return action
    return plain_json(action, "an action")


async def _transport_for(options: ConnectOptions, patience_s: float) -> Transport:
    """The wire that the address asks for; an http:// server is asked what it speaks."""
    address = options.address
    if address.is_grpc:
        return GrpcTransport(options)
    discovered = await retry_until(HttpClient(options).discover, patience_s)
    if discovered.is_legacy and not address.is_websocket:
        return LegacyHttpTransport(options, discovered)
    return WebSocketTransport(options, discovered)
