"""OpenEnv's WebSocket `/ws`: one session per connection, one reply per message.

    frame --> plain step or reset? --> environment on this loop? --> frame, without a task
                |  no                    |  no
                +--> strict message models --> Sessions ------> frame

The server sends a frame only as the reply to a message, because upstream clients treat every frame
as their reply. The only exception is the refusal of a connection, which OpenEnv sends first. When a
session ends while its socket is open, the close frame contains the reason.
`/ws?session_id=<id>` serves an existing session and does not close it at the end. `?ludus=1`
requests the extensions of Ludus, and `&text=0` leaves out the text view.

A connection is accepted immediately and then waits for a free session until the client disconnects.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import orjson
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from ludus.env.asgi.sessions import require_session, shorten
from ludus.env.asgi.socket import AsgiSocket, accept_socket
from ludus.env.encoding import EncodedResult, ResetArgs, plain_json
from ludus.env.mcp.server import McpCaller, McpServer
from ludus.env.messages.openenv import (
    LudusStepMessage,
    McpMessage,
    PlainMessage,
    ResetMessage,
    StepMessage,
    error_data,
    frame,
    ludus_payload,
    observation_payload,
    reset_args,
    validation_error_data,
)
from ludus.env.security.tracing import is_traced
from ludus.env.sessions.interface import OpenArgs, OpenResult
from ludus.env.sessions.tombstones import SessionTombstone
from ludus.env.types import JsonObject
from ludus.proto.errors import (
    EnvError,
    ErrorCode,
    InvalidCallError,
    SessionLostError,
    to_env_error,
)

_MESSAGE_TYPES: dict[str, type[BaseModel]] = {
    "reset": ResetMessage,
    "step": StepMessage,
    "state": PlainMessage,
    "close": PlainMessage,
    "mcp": McpMessage,
}
_LUDUS_MESSAGE_TYPES = _MESSAGE_TYPES | {"step": LudusStepMessage}


class WebSocketWire:
    """The ASGI application of `/ws`."""

    def __init__(self, mcp: McpServer) -> None:
        self._mcp = mcp
        self._sessions = mcp.sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the connection until it ends, then close its session unless it existed before."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        upstream = query.get("ludus") != ["1"]
        with_text = not upstream and query.get("text") != ["0"]
        existing_id = query.get("session_id", [""])[0]
        async with accept_socket(scope, receive, send, self._sessions) as (socket, connection):
            try:
                opened = OpenResult(existing_id, None)
                if not existing_id:
                    opening = self._sessions.open(OpenArgs(with_text=with_text), connection)
                    opened = await socket.run_while_connected(opening)
                server = _WebSocketServer(socket, self._mcp, opened, upstream)
                await self._serve(server, opened.session_id, is_guest=bool(existing_id))
            except EnvError as error:
                data = error_data(error, self._sessions, upstream=upstream)
                await socket.send(frame("error", data))

    async def _serve(self, server: _WebSocketServer, session_id: str, *, is_guest: bool) -> None:
        if is_guest:
            await require_session(self._sessions, session_id)
            self._mcp.evictable.mark_used(session_id)
        if not self._mcp.sockets.claim(session_id, server.on_session_end):
            raise SessionLostError(
                f"Session {session_id} already has an attached WebSocket", ErrorCode.SESSION_ERROR
            )
        try:
            await server.serve()
        finally:
            must_close = self._mcp.sockets.remove(session_id) or not is_guest
            if must_close:
                await self._sessions.close(session_id)


class _WebSocketServer:
    """The server's side of one connection and its session."""

    def __init__(
        self, socket: AsgiSocket, mcp: McpServer, opened: OpenResult, upstream: bool
    ) -> None:
        self._socket = socket
        self._mcp = mcp
        self._sessions = mcp.sessions
        self._session_id = opened.session_id
        self._tools_session_id = opened.tools_session_id
        self._upstream = upstream
        self._message_types = _MESSAGE_TYPES if upstream else _LUDUS_MESSAGE_TYPES
        self._is_answering = False
        self._is_over = False
        self._tombstone: SessionTombstone | None = None
        self._closing: asyncio.Task[None] | None = None
        direct, immediate = socket.direct, mcp.sessions.immediate
        if direct is not None and immediate is not None:
            self._immediate = immediate
            direct.set_direct_handler(_run_in_current_context(self._answer_now))

    def on_session_end(self, tombstone: SessionTombstone) -> None:
        """Close the socket, after the reply to a pending call."""
        self._tombstone = tombstone
        if not self._is_answering:
            closing = self._socket.close_with_reason(tombstone)
            self._closing = asyncio.get_running_loop().create_task(closing)

    async def serve(self) -> None:
        """Answer frames until the client disconnects or the session ends."""
        while True:
            text = await self._receive()
            if text is None:
                return
            self._is_answering = True
            reply = await self._answer(text)
            if reply is not None:
                await self._socket.send(reply)
            self._is_answering = False
            if self._tombstone is not None:
                await self._socket.close_with_reason(self._tombstone)
                return
            if reply is None or self._is_over:
                return

    async def _receive(self) -> str | None:
        """Return the next frame, or None after a frame that ends the connection."""
        try:
            return await self._socket.receive()
        except SessionLostError as error:
            await self._socket.send(frame("error", self._error_data(error)))
            return None

    async def _answer(self, text: str) -> bytes | None:
        """Return the reply, or None to end the connection."""
        try:
            return await self._reply_to(_parse(text))
        except SessionLostError as error:
            self._is_over = True
            return frame("error", self._error_data(error))
        except ValidationError as error:
            return frame("error", validation_error_data(error))
        except Exception as error:  # noqa: BLE001 - the socket and its session must survive
            return frame("error", self._error_data(to_env_error(error)))

    def _answer_now(self, text: bytes) -> bytes | None:
        """Return the reply to a step or reset without a wait, or None if the message needs one."""
        try:
            return self._reply_now(orjson.loads(text))
        except (SessionLostError, orjson.JSONDecodeError):
            return None
        except Exception as error:  # noqa: BLE001 - the socket and its session must survive
            return frame("error", self._error_data(to_env_error(error)))

    def _reply_now(self, message: Any) -> bytes | None:
        plain = _plain_step(message, self._upstream)
        if plain is None:
            args = _plain_reset(message)
            if args is None:
                return None
            return self._first_frame(self._immediate.reset_now(self._session_id, args))
        action, step_index = plain
        if isinstance(action, dict) and self._mcp.understands(action):
            return None
        encoded = action if isinstance(action, str) else plain_json(action, "an action")
        return self._result_frame(self._immediate.step_now(self._session_id, encoded, step_index))

    async def _reply_to(self, raw: JsonObject) -> bytes | None:
        plain = _plain_step(raw, self._upstream)
        if plain is not None:
            return await self._step(*plain)
        kind = raw.get("type", "")
        message_type = self._message_types.get(kind) if isinstance(kind, str) else None
        if message_type is None:
            raise InvalidCallError(
                f"Unknown message type: {shorten(str(kind))}", ErrorCode.UNKNOWN_TYPE
            )
        message = message_type.model_validate(raw)
        match message:
            case StepMessage():
                return await self._step(message.data, 0)
            case LudusStepMessage():
                action = message.text if message.data is None else message.data
                if action is None or (message.text is not None and message.data is not None):
                    raise InvalidCallError("a step needs either data or text, got both or neither")
                return await self._step(action, message.step_index)
            case ResetMessage():
                args = reset_args(message.data, self._sessions.description, lenient=self._upstream)
                return self._first_frame(await self._sessions.reset(self._session_id, args))
            case PlainMessage(type="state"):
                state = await self._sessions.state(self._session_id)
                return frame("state", orjson.Fragment(state))
            case McpMessage():
                caller = McpCaller(self._session_id, self._tools_session_id, is_managed=True)
                return frame("mcp", await self._mcp.reply(message.data, caller))
        return None

    async def _step(self, action: JsonObject | str, step_index: int) -> bytes:
        if isinstance(action, dict) and self._mcp.understands(action):
            payload_json = await self._mcp.step(self._session_id, action)
            return frame("observation", orjson.Fragment(payload_json))
        encoded = action if isinstance(action, str) else plain_json(action, "an action")
        return self._result_frame(await self._sessions.step(self._session_id, encoded, step_index))

    def _first_frame(self, result: EncodedResult) -> bytes:
        if self._upstream or not self._tools_session_id:
            return self._result_frame(result)
        payload = ludus_payload(result) | {"tools_session_id": self._tools_session_id}
        return frame("observation", payload)

    def _result_frame(self, result: EncodedResult) -> bytes:
        payload = observation_payload(result) if self._upstream else ludus_payload(result)
        return frame("observation", payload)

    def _error_data(self, error: EnvError) -> JsonObject:
        return error_data(error, self._sessions, upstream=self._upstream)


def _parse(text: str) -> JsonObject:
    try:
        message = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidCallError(f"Invalid JSON: {error}", ErrorCode.INVALID_JSON) from None
    if not isinstance(message, dict):
        raise SessionLostError(
            f"expected a JSON object, got {type(message).__name__}", ErrorCode.SESSION_ERROR
        )
    return message


def _plain_step(message: Any, upstream: bool) -> tuple[JsonObject | str, int] | None:
    """Return the action or text and the number of a step without other keys; otherwise None."""
    if type(message) is not dict or message.get("type") != "step":
        return None
    action: JsonObject | str | None = message.get("data")
    if type(action) is not dict:
        action = None if upstream else message.get("text")
        if type(action) is not str:
            return None
    if len(message) == 2:
        return action, 0
    step_index = message.get("step_index")
    if upstream or len(message) != 3 or type(step_index) is not int or step_index < 0:
        return None
    return action, step_index


def _plain_reset(message: Any) -> ResetArgs | None:
    """Return the arguments of a reset with only a seed; otherwise None."""
    if type(message) is not dict or len(message) != 2 or message.get("type") != "reset":
        return None
    data = message.get("data")
    if type(data) is not dict or len(data) != 1:
        return None
    seed = data.get("seed")
    return ResetArgs(seed) if type(seed) is int and seed >= 0 else None


def _run_in_current_context(
    handler: Callable[[bytes], bytes | None],
) -> Callable[[bytes], bytes | None]:
    """Return a handler that runs with the current trace span and request id, if there are any."""
    if not is_traced():
        return handler
    context = contextvars.copy_context()
    return lambda text: context.run(handler, text)
