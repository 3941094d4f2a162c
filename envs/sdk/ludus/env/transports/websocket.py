"""The client's WebSocket wire: OpenEnv's `/ws`, one connection per session.

The wire supports every OpenEnv server from version 0.2. Upstream servers reject unknown keys, so
the client requests the extensions of Ludus (text, step numbers, separate `terminated` and
`truncated`) only if the server's /metadata contains `ludus`. For upstream servers, the client
renders the text from the fields of the observation. A session ends with its connection.
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
from ludus.env.transports.call_connection import CallConnection
from ludus.env.transports.discovery import DiscoveredServer, HttpClient, refusal, unreachable
from ludus.env.transports.interface import (
    OpenedWire,
    RemoteServer,
    check_group,
    retry_unavailable,
)
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult, TextView, Tool
from ludus.proto.errors import (
    ActionParseError,
    CallTimeoutError,
    ConfigError,
    InvalidCallError,
    SessionLostError,
    ToolError,
    error_from_wire,
)

_CLOSE_TIMEOUT_S = 2.0


class WebSocketTransport:
    """A server's address and description; each session has its own connection."""

    def __init__(self, server: RemoteServer, discovered: DiscoveredServer | None = None) -> None:
        self.server = server
        self._headers = {"authorization": server.authorization} if server.authorization else {}
        self._tls: dict[str, Any] = {}
        if server.address.is_secure:
            self._tls["ssl"] = server.ssl_context()
            if server.options.server_name:
                self._tls["server_hostname"] = server.options.server_name
        self._discovered = discovered
        self._sessions: set[WebSocketSession] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def connect(self, timeout_s: float) -> None:
        """Request the server's description."""
        if self._discovered is None:
            self._discovered = await retry_unavailable(HttpClient(self.server).discover, timeout_s)

    async def describe(self) -> EnvironmentDescription:
        """Return the server's description; upstream servers provide only a part of it."""
        metadata, schema = self._description.metadata, self._description.schema
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
        """Open a connection, and return its session and the first result if one was requested.

        Raises:
            ConfigError: `linger_s` is set, which this wire does not support.
        """
        if args.linger_s > 0:
            raise ConfigError(
                f"linger_s must be 0 for {self.server.address}, got {args.linger_s:g}: over"
                " WebSocket a session ends with its connection; use the server's grpc:// address,"
                " or resume=True"
            )
        socket = await retry_unavailable(
            lambda: self._open_socket(args.with_text), self.server.options.reconnect_timeout_s
        )
        session = WebSocketSession(socket, self, self.server, args)
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
        """Open `size` sessions with one seed and equal first results, or none of them."""
        reset = DefaultSeeds().fill(args.reset or ResetArgs())
        args = replace(args, reset=reset)
        opening = [asyncio.ensure_future(self.open(args)) for _ in range(size)]
        try:
            opened_sessions = await asyncio.gather(*opening)
            check_group((first_result for _, first_result in opened_sessions), reset.seed)
        except BaseException:
            await self._close_all(opening)
            raise
        return opened_sessions

    async def close(self) -> None:
        """Close all connections."""
        for session in list(self._sessions):
            session.abandon()
        while self._closing:
            await asyncio.gather(*self._closing)

    @property
    def has_extras(self) -> bool:
        """True if the server supports the extensions of Ludus."""
        return "ludus" in self._description.metadata

    @property
    def fields_text(self) -> FieldsText | None:
        """A renderer for upstream servers; None if the server has text or its actions are tools."""
        schema = self._description.schema.get("action") or {}
        fields = schema.get("properties", {}).keys() - {"metadata"}
        if self.has_extras or not fields or "tool_name" in fields:
            return None
        return FieldsText(self._description.metadata.get("name") or "", schema)

    def forget(self, session: WebSocketSession, socket: CallConnection) -> None:
        """Close a session's connection in the background."""
        if session in self._sessions:
            self._sessions.remove(session)
            task = asyncio.get_running_loop().create_task(socket.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    @property
    def _description(self) -> DiscoveredServer:
        assert self._discovered is not None, "connect was not called"
        return self._discovered

    async def _close_all(self, opening: Sequence[asyncio.Future[OpenedWire]]) -> None:
        for future in opening:
            future.cancel()
        for outcome in await asyncio.gather(*opening, return_exceptions=True):
            if not isinstance(outcome, BaseException):
                outcome[0].abandon()

    async def _open_socket(self, with_text: bool) -> CallConnection:
        query = ""
        if self.has_extras:
            query = "?ludus=1" if with_text else "?ludus=1&text=0"
        try:
            socket = await connect(
                f"{self.server.address.ws_base}/ws{query}",
                additional_headers={**self._headers, **trace_headers()},
                compression=None,
                max_size=MAX_REPLY_BYTES,
                open_timeout=self.server.options.timeout_s,
                close_timeout=_CLOSE_TIMEOUT_S,
                proxy=None,
                create_connection=CallConnection,
                **self._tls,
            )
        except InvalidStatus as error:
            response = error.response
            wait, body = response.headers.get("retry-after"), bytes(response.body or b"")
            raise refusal(self.server.address, response.status_code, wait, body) from None
        except (OSError, InvalidHandshake) as error:
            raise unreachable(self.server.address, error) from error
        assert isinstance(socket, CallConnection), "create_connection made it"
        return socket


class WebSocketSession:
    """One session on its own connection."""

    def __init__(
        self,
        socket: CallConnection,
        transport: WebSocketTransport,
        server: RemoteServer,
        args: OpenArgs,
    ) -> None:
        self.session_id = str(socket.id)
        self.tools_session_id = ""
        self._socket = socket
        self._transport = transport
        self._address = server.address
        self._timeout_s = server.options.timeout_s
        self._close_when_done = args.close_when_done
        self._with_text = args.with_text
        self._fields_text = transport.fields_text if args.with_text else None
        self._observation: JsonObject = {}
        """The last observation, for reading a text action on the client."""

    async def reset(self, args: ResetArgs) -> StepResult:
        """Start a new episode and return its first result."""
        return self._read_first(await self._call(_reset_message(args)))

    async def step(self, action: bytes | str, step_index: int) -> StepResult:
        """Return the result of an action. Bytes are JSON; a str is text."""
        with self._parse_errors(action):
            data = await self._call(self._step_message(action, step_index))
        return self._read_step(data, step_index)

    async def state(self) -> JsonObject:
        """Return the environment's state."""
        return await self._call({"type": "state"})

    async def call_tool(self, name: str, arguments: JsonObject) -> JsonObject:
        """Call a tool by OpenEnv's action for tools, and return the tool's result."""
        encoded_arguments = orjson.Fragment(plain_json(arguments, "arguments"))
        action = {"type": "call_tool", "tool_name": name, "arguments": encoded_arguments}
        data = await self._call({"type": "step", "data": action})
        returned = data.get("observation") or {}
        if error := returned.get("error"):
            raise ToolError(f"tool '{name}' failed: {error.get('message') or error}")
        result = returned.get("result")
        structured = result.get("structured_content") if isinstance(result, dict) else None
        return structured if isinstance(structured, dict) else {"result": result}

    async def close(self) -> None:
        """Close the connection, which ends the session."""
        self.abandon()
        await self._socket.wait_closed()

    def abandon(self) -> None:
        """Close the connection without waiting for it."""
        self._transport.forget(self, self._socket)

    def timeout_error(self) -> CallTimeoutError:
        """Return the error for a call without a response in time."""
        return CallTimeoutError(
            f"{self._address} did not respond within {self._timeout_s:g} s; the session is closed"
        )

    async def _call(self, message: JsonObject) -> JsonObject:
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        exchange = self._exchange(self._encode(message))
        return _read_reply(await self._wait_until(deadline_s, exchange))

    async def _wait_until(
        self, deadline_s: float, reply: Coroutine[Any, Any, str | bytes]
    ) -> str | bytes:
        try:
            async with asyncio.timeout_at(deadline_s):
                return await reply
        except TimeoutError:
            raise self.timeout_error() from None
        except ConnectionClosed as error:
            raise SessionLostError(
                f"session lost: the connection to {self._address} broke: {error}; open a new one"
            ) from None

    async def _exchange(self, message: bytes) -> str | bytes:
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        if self._socket.send_request(message, partial(_settle, future)):
            reply = await future
            if reply is not None:
                return reply
        else:
            # A server that refuses the session reports the reason in a frame that waits to be read.
            with contextlib.suppress(ConnectionClosed):
                await self._socket.send(message, text=True)
        return await self._socket.recv()

    def _encode(self, message: JsonObject) -> bytes:
        text = plain_json(message, "a call")
        if len(text) > MAX_MESSAGE_BYTES:
            raise InvalidCallError(
                f"a call to {self._address} must have at most {MAX_MESSAGE_BYTES} bytes,"
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
                f"{self._address}, an upstream OpenEnv server, does not accept text;"
                " send a JSON action"
            )
        return {**message, "text": action} if isinstance(action, str) else message

    def _read_first(self, data: JsonObject) -> StepResult:
        self.tools_session_id = data.get("tools_session_id", self.tools_session_id)
        return self._read_result(data, 0)

    def _read_step(self, data: JsonObject, step_index: int) -> StepResult:
        result = self._read_result(data, step_index)
        if self._close_when_done and result.done:
            self.abandon()
        return result

    def _read_result(self, data: JsonObject, step_index: int) -> StepResult:
        """Convert a payload. Upstream servers send no separate flags and no step numbers."""
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
            text=self._render_text(data, is_first=step_index == 0),
            tensors=read_tensors_json(data["tensors"]) if "tensors" in data else {},
            success=success,
        )

    @contextlib.contextmanager
    def _parse_errors(self, action: bytes | str) -> Iterator[None]:
        """Convert an upstream server's refusal of an action from text to an ActionParseError."""
        try:
            yield
        except InvalidCallError as error:
            if isinstance(action, bytes) or self._fields_text is None:
                raise
            raise ActionParseError(f"{error.message}, from the text {action[-200:]!r}") from None

    def _render_text(self, data: JsonObject, *, is_first: bool) -> TextView | None:
        if self._fields_text is not None:
            observation = self._observation = data["observation"]
            content = self._fields_text.content(observation, first=is_first)
            answers = self._fields_text.legal_answers(observation)
            return TextView([{"role": "user", "content": content}], answers)
        text = data.get("text") if self._with_text else None
        return TextView(text["messages"], text["legal_answers"]) if text else None


def _settle(future: asyncio.Future[str | None], reply: str | None) -> None:
    if not future.done():
        future.set_result(reply)


def _reset_message(args: ResetArgs) -> JsonObject:
    data = dict(args.options)
    if args.seed is not None:
        data["seed"] = args.seed
    if args.episode_id:
        data["episode_id"] = args.episode_id
    return {"type": "reset", "data": orjson.Fragment(plain_json(data, "reset options"))}


def _read_reply(reply: str | bytes) -> JsonObject:
    """Return the data of a reply, or raise the error in it."""
    message = orjson.loads(reply)
    data: JsonObject = message["data"]
    if message["type"] == "error":
        retry_after_s = data.get("retry_after_s", 0.0)
        raise error_from_wire(data["code"], data["message"], retry_after_s)
    return data
