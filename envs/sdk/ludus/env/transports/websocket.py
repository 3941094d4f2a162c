"""The client's WebSocket wire: OpenEnv's `/ws`, one connection per session.

Drives any OpenEnv server from 0.2 on. Extras (text, step numbers, `terminated` apart from
`truncated`) are asked for only when the server's /metadata advertises `ludus`: upstream
servers refuse unknown keys. Their text is made here, of the fields, as for classes of OpenEnv's
that we serve. A session ends with its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from ludus.env.encoding import DefaultSeeds, ResetArgs, plain_json, read_success
from ludus.env.limits import MAX_MESSAGE_BYTES, MAX_REPLY_BYTES
from ludus.env.messages.openenv import read_tasks, read_tensors_json, upstream_metadata
from ludus.env.security.tracing import trace_headers
from ludus.env.sessions.interface import OpenArgs
from ludus.env.text.fields import FieldsText
from ludus.env.transports.call_connection import CallConnection, OnReply
from ludus.env.transports.discovery import DiscoveredServer, HttpClient, refusal, unreachable
from ludus.env.transports.interface import (
    ConnectOptions,
    OpenedWire,
    StepCall,
    check_group,
    retry_until,
    step_or_error,
)
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult, TextView, Tool
from ludus.proto.errors import (
    ActionParseError,
    CallTimeoutError,
    ConfigError,
    EnvError,
    InvalidCallError,
    SessionLostError,
    ToolError,
    error_from_wire,
)

_CLOSE_TIMEOUT_S = 2.0


class WebSocketTransport:
    """A server's address and what it advertises; each session has its own connection."""

    def __init__(self, options: ConnectOptions, discovered: DiscoveredServer | None = None) -> None:
        self._options = options
        self._headers = {"authorization": options.authorization} if options.authorization else {}
        self._tls: dict[str, Any] = {}
        if options.address.is_secure:
            self._tls["ssl"] = options.ssl_context()
            if options.server_name:
                self._tls["server_hostname"] = options.server_name
        self._discovered = discovered
        self._sessions: set[WebSocketSession] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def connect(self, patience_s: float) -> None:
        """Ask the server what it is."""
        if self._discovered is None:
            self._discovered = await retry_until(HttpClient(self._options).discover, patience_s)

    async def describe(self) -> EnvironmentDescription:
        """What the server said of its environment; upstream servers know less."""
        metadata, schema = self._server.metadata, self._server.schema
        ludus = metadata.get("ludus") or {}
        reset_options = ludus.get("reset_options")
        return EnvironmentDescription(
            name=metadata.get("name") or "",
            description=metadata.get("description") or "",
            version=metadata.get("version") or "",
            action_schema=schema.get("action") or {},
            observation_schema=schema.get("observation") or {},
            state_schema=schema.get("state") or {},
            has_text_view=ludus.get("has_text_view", False),
            max_sessions=ludus.get("max_sessions", 0),
            options=ludus.get("options", {}),
            reset_options=None if reset_options is None else frozenset(reset_options),
            is_deterministic=ludus.get("is_deterministic", False),
            tools=[Tool(**tool) for tool in ludus.get("tools", [])],
            server_id=ludus.get("server_id", ""),
            idle_timeout_s=ludus.get("idle_timeout_s", 0.0),
            tasks=read_tasks(ludus),
            takes_any_text=ludus.get("takes_any_text", False),
        )

    async def open(self, args: OpenArgs) -> OpenedWire:
        """A new connection, with its first result when a reset was asked for.

        Raises:
            ConfigError: the session is to outlive its connection, which it cannot.
        """
        if args.linger_s > 0:
            raise ConfigError(
                f"expected linger_s 0 for {self._options.address}, got {args.linger_s:g}: over"
                " WebSocket a session ends with its connection; use the server's grpc:// address,"
                " or resume=True"
            )
        socket = await retry_until(
            lambda: self._open_socket(args.with_text), self._options.reconnect_timeout_s
        )
        session = WebSocketSession(socket, self, self._options, args)
        self._sessions.add(session)
        try:
            if args.reset is not None:
                return session, await session.reset(args.reset)
            await session.state()  # a full server refuses only the first call
        except BaseException:
            session.abandon()
            raise
        return session, None

    async def open_group(self, args: OpenArgs, size: int) -> list[OpenedWire]:
        """Sessions on one seed, all or none, whose first results are the same."""
        reset = DefaultSeeds().fill(args.reset or ResetArgs())
        args = replace(args, reset=reset)
        opening = [asyncio.ensure_future(self.open(args)) for _ in range(size)]
        try:
            opened = await asyncio.gather(*opening)
            check_group((first for _, first in opened), reset.seed)
        except BaseException:
            await self._close_all(opening)
            raise
        return opened

    async def step_many(self, calls: Sequence[StepCall]) -> list[StepResult | EnvError]:
        """One result or error per call, in order; each travels on its own connection."""
        return await _Round(calls, self._options).outcomes()

    async def close(self) -> None:
        """End all connections."""
        for session in list(self._sessions):
            session.abandon()
        while self._closing:
            await asyncio.gather(*self._closing)

    @property
    def has_extras(self) -> bool:
        """True when the server understands our extras."""
        return "ludus" in self._server.metadata

    @property
    def fields_text(self) -> FieldsText | None:
        """The text of a server that has none; None where it has, or its actions call tools."""
        schema = self._server.schema.get("action") or {}
        fields = schema.get("properties", {}).keys() - {"metadata"}
        if self.has_extras or not fields or "tool_name" in fields:
            return None
        return FieldsText(self._server.metadata.get("name") or "", schema)

    def forget(self, session: WebSocketSession, socket: CallConnection) -> None:
        """Close a session's connection in the background."""
        if session in self._sessions:
            self._sessions.remove(session)
            task = asyncio.get_running_loop().create_task(socket.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    @property
    def _server(self) -> DiscoveredServer:
        assert self._discovered is not None, "connect comes first"
        return self._discovered

    async def _close_all(self, opening: Sequence[asyncio.Future[OpenedWire]]) -> None:
        for one in opening:
            one.cancel()
        for outcome in await asyncio.gather(*opening, return_exceptions=True):
            if not isinstance(outcome, BaseException):
                outcome[0].abandon()

    async def _open_socket(self, with_text: bool) -> CallConnection:
        query = ""
        if self.has_extras:
            query = "?ludus=1" if with_text else "?ludus=1&text=0"
        try:
            socket = await connect(
                f"{self._options.address.ws_base}/ws{query}",
                additional_headers={**self._headers, **trace_headers()},
                compression=None,
                max_size=MAX_REPLY_BYTES,
                open_timeout=self._options.timeout_s,
                close_timeout=_CLOSE_TIMEOUT_S,
                proxy=None,
                create_connection=CallConnection,
                **self._tls,
            )
        except InvalidStatus as error:
            response = error.response
            wait, body = response.headers.get("retry-after"), bytes(response.body or b"")
            raise refusal(self._options, response.status_code, wait, body) from None
        except (OSError, InvalidHandshake) as error:
            raise unreachable(self._options, error) from error
        assert isinstance(socket, CallConnection), "it was made by create_connection"
        return socket


class WebSocketSession:
    """One connection, one session."""

    def __init__(
        self,
        socket: CallConnection,
        transport: WebSocketTransport,
        options: ConnectOptions,
        args: OpenArgs,
    ) -> None:
        self.session_id = str(socket.id)
        self.tools_session_id = ""
        self._socket = socket
        self._transport = transport
        self._options = options
        self._close_when_done = args.close_when_done
        self._with_text = args.with_text
        self._fields_text = transport.fields_text if args.with_text else None
        self._observation: JsonObject = {}  # the newest, for an answer that is read here

    async def reset(self, args: ResetArgs) -> StepResult:
        """The first result of a new episode."""
        return self._first_of(await self._call(_reset_message(args)))

    async def step(self, action: bytes | str, step_index: int) -> StepResult:
        """The result of an action: bytes are JSON, a str is text."""
        with self._reading(action):
            data = await self._call(self._step_message(action, step_index))
        return self._result_of(data, step_index)

    def begin(self, call: StepCall, on_reply: OnReply) -> bool:
        """True when a call is on its way and its reply will be handed on; see `outcome`.

        False leaves it to `step` and `reset`.

        Raises:
            InvalidCallError: it cannot be sent.
        """
        if isinstance(call.action, ResetArgs):
            message = _reset_message(call.action)
        else:
            message = self._step_message(call.action, call.step_index)
        return self._socket.ask(self._encoded(message), on_reply)

    def outcome(self, call: StepCall, reply: str | bytes) -> StepResult:
        """What the reply to a call says; raises the error that it says."""
        if isinstance(call.action, ResetArgs):
            return self._first_of(_read_reply(reply))
        with self._reading(call.action):
            data = _read_reply(reply)
        return self._result_of(data, call.step_index)

    async def outcome_or_error(self, call: StepCall, deadline_s: float) -> StepResult | EnvError:
        """The same for a call that was begun and whose reply is still to be read."""
        try:
            return self.outcome(call, await self._within(deadline_s, self._socket.recv()))
        except EnvError as error:
            return error

    async def state(self) -> JsonObject:
        """The environment's state."""
        return await self._call({"type": "state"})

    async def call_tool(self, name: str, arguments: JsonObject) -> JsonObject:
        """What a tool of the environment returned, called by OpenEnv's action for it."""
        encoded = orjson.Fragment(plain_json(arguments, "arguments"))
        action = {"type": "call_tool", "tool_name": name, "arguments": encoded}
        data = await self._call({"type": "step", "data": action})
        returned = data.get("observation") or {}
        if error := returned.get("error"):
            raise ToolError(f"tool '{name}' failed: {error.get('message') or error}")
        result = returned.get("result")
        structured = result.get("structured_content") if isinstance(result, dict) else None
        return structured if isinstance(structured, dict) else {"result": result}

    async def close(self) -> None:
        """Close the connection, which frees the session."""
        self.abandon()
        await self._socket.wait_closed()

    def abandon(self) -> None:
        """Close the connection without waiting for it."""
        self._transport.forget(self, self._socket)

    def late(self) -> CallTimeoutError:
        """The error of a call that was not answered in time."""
        return CallTimeoutError(
            f"expected an answer from {self._options.address} within"
            f" {self._options.timeout_s:g} s, got none; the session is dropped"
        )

    async def _call(self, message: JsonObject) -> JsonObject:
        deadline_s = asyncio.get_running_loop().time() + self._options.timeout_s
        return _read_reply(await self._within(deadline_s, self._exchange(self._encoded(message))))

    async def _within(
        self, deadline_s: float, reply: Coroutine[Any, Any, str | bytes]
    ) -> str | bytes:
        try:
            async with asyncio.timeout_at(deadline_s):
                return await reply
        except TimeoutError:
            raise self.late() from None
        except ConnectionClosed as error:
            raise SessionLostError(
                f"session lost: the connection to {self._options.address} broke: {error};"
                " open a new one"
            ) from None

    async def _exchange(self, message: bytes) -> str | bytes:
        replied: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        if self._socket.ask(message, partial(_settle, replied)):
            reply = await replied
            if reply is not None:
                return reply
        else:
            # A server that refuses says why in a frame that waits to be read.
            with contextlib.suppress(ConnectionClosed):
                await self._socket.send(message, text=True)
        return await self._socket.recv()

    def _encoded(self, message: JsonObject) -> bytes:
        text = plain_json(message, "a call")
        if len(text) > MAX_MESSAGE_BYTES:
            raise InvalidCallError(
                f"expected a call of at most {MAX_MESSAGE_BYTES} bytes to {self._options.address},"
                f" got {len(text)}; send less in one call"
            )
        return text

    def _step_message(self, action: bytes | str, step_index: int) -> JsonObject:
        message: JsonObject = {"type": "step"}
        if isinstance(action, str) and self._fields_text is not None:
            return {**message, "data": self._fields_text.action(action, self._observation)}
        if isinstance(action, bytes):
            message["data"] = orjson.Fragment(action)
        if self._transport.has_extras:
            message["step_index"] = step_index
        if isinstance(action, str) and not self._transport.has_extras:
            raise InvalidCallError(
                f"expected a JSON action: {self._options.address} is an upstream OpenEnv server"
                " and reads no text"
            )
        return {**message, "text": action} if isinstance(action, str) else message

    def _first_of(self, data: JsonObject) -> StepResult:
        self.tools_session_id = data.get("tools_session_id", self.tools_session_id)
        return self._read_result(data, 0)

    def _result_of(self, data: JsonObject, step_index: int) -> StepResult:
        result = self._read_result(data, step_index)
        if self._close_when_done and result.done:
            self.abandon()
        return result

    def _read_result(self, data: JsonObject, step_index: int) -> StepResult:
        """The result in a payload; upstream servers send neither flags nor numbers."""
        reward: Any = data.get("reward")
        is_done = bool(data.get("done"))
        if self._transport.has_extras:
            info, success = data.get("info", {}), data.get("success")
        else:
            info = upstream_metadata(data)
            success = read_success(info, is_done=is_done)
        return StepResult(
            observation=data["observation"],
            reward=None if reward is None else float(reward),
            terminated=data.get("terminated", is_done),
            truncated=data.get("truncated", False),
            info=info,
            step_index=data.get("step_index", step_index),
            text=self._text_of(data, is_first=step_index == 0),
            tensors=read_tensors_json(data["tensors"]) if "tensors" in data else {},
            success=success,
        )

    @contextlib.contextmanager
    def _reading(self, action: bytes | str) -> Iterator[None]:
        """What an upstream server refuses of an action that was read here is the text's fault."""
        try:
            yield
        except InvalidCallError as error:
            if isinstance(action, bytes) or self._fields_text is None:
                raise
            raise ActionParseError(f"{error.message}, from the text {action[-200:]!r}") from None

    def _text_of(self, data: JsonObject, *, is_first: bool) -> TextView | None:
        if self._fields_text is not None:
            seen = self._observation = data["observation"]
            shown = self._fields_text.content(seen, first=is_first)
            answers = self._fields_text.legal_answers(seen)
            return TextView([{"role": "user", "content": shown}], answers)
        text = data.get("text") if self._with_text else None
        return TextView(text["messages"], text["legal_answers"]) if text else None


class _Round:
    """The calls of one `step_many`: all are written, then their replies read as they come."""

    def __init__(self, calls: Sequence[StepCall], options: ConnectOptions) -> None:
        loop = asyncio.get_running_loop()
        self._calls = calls
        self._deadline_s = loop.time() + options.timeout_s
        self._outcomes: list[StepResult | EnvError | None] = [None] * len(calls)
        self._num_missing = len(calls)
        self._all_there: asyncio.Future[None] = loop.create_future()
        self._alone: dict[int, asyncio.Task[StepResult | EnvError]] = {}
        """Calls that take the long way, each with a limit of its own."""

    async def outcomes(self) -> list[StepResult | EnvError]:
        """One result or error per call, in order."""
        try:
            for index, call in enumerate(self._calls):
                self._begin(index, call)
            await self._wait()
            for index, outcome in zip(
                list(self._alone), await asyncio.gather(*self._alone.values()), strict=True
            ):
                self._outcomes[index] = outcome
        except BaseException:
            for task in self._alone.values():
                task.cancel()
            raise
        return [
            _session_of(call).late() if outcome is None else outcome
            for call, outcome in zip(self._calls, self._outcomes, strict=True)
        ]

    async def _wait(self) -> None:
        if self._num_missing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._deadline_s):
                    await self._all_there

    def _begin(self, index: int, call: StepCall) -> None:
        try:
            if not _session_of(call).begin(call, partial(self._take, index)):
                self._leave(index, step_or_error(call))
        except EnvError as error:
            self._settle(index, error)

    def _take(self, index: int, reply: str | None) -> None:
        if self._all_there.done():  # the caller waits no more
            return
        call = self._calls[index]
        session = _session_of(call)
        if reply is None:
            self._leave(index, session.outcome_or_error(call, self._deadline_s))
            return
        try:
            self._settle(index, session.outcome(call, reply))
        except EnvError as error:
            self._settle(index, error)
        except Exception as error:  # noqa: BLE001 - what is no reply is the caller's to see
            self._all_there.set_exception(error)

    def _leave(self, index: int, call: Coroutine[Any, Any, StepResult | EnvError]) -> None:
        self._alone[index] = asyncio.get_running_loop().create_task(call)
        self._settle(index, None)

    def _settle(self, index: int, outcome: StepResult | EnvError | None) -> None:
        self._outcomes[index] = outcome
        self._num_missing -= 1
        if not self._num_missing and not self._all_there.done():
            self._all_there.set_result(None)


def _session_of(call: StepCall) -> WebSocketSession:
    assert isinstance(call.session, WebSocketSession), "it was opened by this transport"
    return call.session


def _settle(replied: asyncio.Future[str | None], reply: str | None) -> None:
    if not replied.done():
        replied.set_result(reply)


def _reset_message(args: ResetArgs) -> JsonObject:
    data = dict(args.options)
    if args.seed is not None:
        data["seed"] = args.seed
    if args.episode_id:
        data["episode_id"] = args.episode_id
    return {"type": "reset", "data": orjson.Fragment(plain_json(data, "reset options"))}


def _read_reply(reply: str | bytes) -> JsonObject:
    """The data of a reply; raises the error that it says."""
    message = orjson.loads(reply)
    data: JsonObject = message["data"]
    if message["type"] == "error":
        retry_after_s = data.get("retry_after_s", 0.0)
        raise error_from_wire(data["code"], data["message"], retry_after_s)
    return data
