"""The asynchronous client: sessions of a remote environment, the same over every wire.

async with await AsyncEnvClient.connect("grpc://127.0.0.1:18000") as client:
    session, first = await client.open(seed=7)
    result = await session.step({"action_id": 1})
    result = await session.step(text="STAND")
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import orjson

from ludus.env.encoding import ResetArgs
from ludus.env.grpc_transport import GrpcTransport
from ludus.env.transport import ConnectOptions, StepCall, Transport, WireSession
from ludus.env.types import Action, EnvironmentDescription, JsonObject, StepResult
from ludus.env.websocket_transport import WebSocketTransport
from ludus.proto.errors import (
    ConfigError,
    EnvError,
    EpisodeStateError,
    ErrorCode,
    InfrastructureError,
    InvalidCallError,
    SessionLostError,
)


class AsyncEnvClient:
    """A connection to an environment server; opens any number of sessions."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        connect_timeout_s: float = 10.0,
        reconnect_timeout_s: float = 60.0,
    ) -> AsyncEnvClient:
        """A client whose server has answered.

        Args:
            address: grpc://host:port, or http:// or ws:// for the WebSocket wire.
            timeout_s: for one call; a call that takes longer drops its session.
            reconnect_timeout_s: how long `open` waits for a server that went away.

        Raises:
            ConfigError: the address has no known scheme.
            UnavailableError: the server did not answer within `connect_timeout_s`.
            AuthenticationError: the token is missing or wrong.
        """
        options = ConnectOptions(address, token, timeout_s, reconnect_timeout_s)
        transport = _transport_of(options)
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
    ) -> tuple[AsyncSession, StepResult]:
        """A new session and the first result of its first episode.

        Args:
            close_when_done: frees the session as soon as the episode has ended.

        Raises:
            CapacityError: all sessions of the server are taken.
            UnavailableError: the server is away and did not come back in time.
        """
        args = ResetArgs(seed, episode_id, options or {})
        wire, first = await self._transport.open(args, close_when_done)
        assert first is not None, "a reset was asked for"
        return AsyncSession(wire, close_when_done), first

    async def open_session(self) -> AsyncSession:
        """A new session, to be reset before its first step."""
        wire, _ = await self._transport.open(None, False)
        return AsyncSession(wire, False)

    async def step_many(
        self, steps: Sequence[tuple[AsyncSession, Action | JsonObject | str]]
    ) -> list[StepResult | EnvError]:
        """One result or error per step, in order; a str is text, anything else an action."""
        outcomes: list[StepResult | EnvError | None] = [None] * len(steps)
        begun: list[tuple[int, AsyncSession, StepCall]] = []
        for index, (session, action) in enumerate(steps):
            try:
                begun.append((index, session, session._begin_step(encode_action(action))))
            except EnvError as error:
                outcomes[index] = error
        try:
            answers = await self._transport.step_many([call for _, _, call in begun])
        except BaseException as error:
            for _, session, _ in begun:
                session._end_step(error)
            raise
        for (index, session, _), answer in zip(begun, answers, strict=True):
            session._end_step(answer)
            outcomes[index] = answer
        return [outcome for outcome in outcomes if outcome is not None]

    async def close(self) -> None:
        """Ends the connection and with it all its sessions."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncEnvClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


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
        """The session's id on the server."""
        return self._wire.session_id

    @property
    def step_index(self) -> int:
        """Steps taken in this episode."""
        return self._step_index

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
        call = self._begin_step(encode_action(action if text is None else text))
        try:
            result = await self._wire.step(call.action, call.step_index)
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

    def _begin_step(self, action: bytes | str) -> StepCall:
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


def encode_action(action: Any) -> bytes | str:
    """What travels for an action: text stays text, anything else becomes JSON."""
    if isinstance(action, str):
        return action
    if isinstance(action, Action):
        return action.__pydantic_serializer__.to_json(action)
    return orjson.dumps(action, option=orjson.OPT_SERIALIZE_NUMPY)


def _transport_of(options: ConnectOptions) -> Transport:
    scheme = options.address.partition("://")[0]
    if scheme == "grpc":
        return GrpcTransport(options)
    if scheme in ("http", "https", "ws", "wss"):
        return WebSocketTransport(options)
    raise ConfigError(
        f"expected an address like grpc://host:port or http://host:port, got {options.address!r}"
    )
