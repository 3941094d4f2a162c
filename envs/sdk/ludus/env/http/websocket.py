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
from typing import Any
from urllib.parse import parse_qs

import orjson
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from ludus.env.asgi.sessions import require_session
from ludus.env.asgi.socket import AsgiSocket, accept_socket
from ludus.env.asgi.uvicorn_protocols import DirectHandler
from ludus.env.encoding import EncodedResult, ResetArgs, encode_json
from ludus.env.incoming.faults import shorten
from ludus.env.mcp.server import McpCaller, McpServer
from ludus.env.messages.openenv import (
    LudusStepMessage,
    McpMessage,
    PlainMessage,
    ResetMessage,
    StepMessage,
    encode_frame,
    make_error_data,
    make_ludus_payload,
    make_upstream_payload,
    make_validation_error_data,
    parse_reset_args,
)
from ludus.env.security.tracing import is_traced
from ludus.env.sessions.interface import OpenArgs, OpenResult
from ludus.env.sessions.tombstones import SessionTombstone
from ludus.env.text.unicode import parse_json
from ludus.env.types import JsonObject
from ludus.proto.errors import EnvError, ErrorCode, InvalidCallError, SessionLostError, to_env_error

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
        """Serve the connection until it ends. Then close its session if it opened one."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        is_upstream = query.get("ludus") != ["1"]
        with_text = not is_upstream and query.get("text") != ["0"]
        existing_id = query.get("session_id", [""])[0]
        async with accept_socket(scope, receive, send, self._sessions) as (socket, connection):
            try:
                open_result = OpenResult(existing_id, None)
                if not existing_id:
                    open_call = self._sessions.open(OpenArgs(with_text=with_text), connection)
                    open_result = await socket.run_while_connected(open_call)
                server = _SocketServer(socket, self._mcp, open_result, is_upstream)
                await self._serve(server, open_result.session_id, is_existing=bool(existing_id))
            except EnvError as error:
                error_data = make_error_data(error, self._sessions, is_upstream=is_upstream)
                await socket.send(encode_frame("error", error_data))

    async def _serve(self, server: _SocketServer, session_id: str, *, is_existing: bool) -> None:
        if is_existing:
            await require_session(self._sessions, session_id)
            self._mcp.evictable.mark_used(session_id)
        if not self._mcp.sockets.claim(session_id, server.on_session_end):
            raise SessionLostError(
                f"Session {session_id} already has an attached WebSocket", ErrorCode.SESSION_ERROR
            )
        try:
            await server.serve()
        finally:
            must_close = self._mcp.sockets.remove(session_id) or not is_existing
            if must_close:
                await self._sessions.close(session_id)


class _SocketServer:
    """The server's side of one connection and its session."""

    def __init__(
        self, socket: AsgiSocket, mcp: McpServer, open_result: OpenResult, is_upstream: bool
    ) -> None:
        self._socket = socket
        self._mcp = mcp
        self._sessions = mcp.sessions
        self._session_id = open_result.session_id
        self._tools_session_id = open_result.tools_session_id
        self._is_upstream = is_upstream
        self._message_types = _MESSAGE_TYPES if is_upstream else _LUDUS_MESSAGE_TYPES
        self._is_answering = False
        self._has_ended = False
        self._tombstone: SessionTombstone | None = None
        self._close_task: asyncio.Task[None] | None = None
        direct_path, immediate_calls = socket.direct_path, mcp.sessions.immediate_calls
        if direct_path is not None and immediate_calls is not None:
            self._immediate_calls = immediate_calls
            direct_path.set_direct_handler(_bind_current_context(self._try_answer_frame))

    def on_session_end(self, tombstone: SessionTombstone) -> None:
        """Close the socket, after the reply to a pending call."""
        self._tombstone = tombstone
        if not self._is_answering:
            close_call = self._socket.close_with_reason(tombstone)
            self._close_task = asyncio.get_running_loop().create_task(close_call)

    async def serve(self) -> None:
        """Answer frames until the client disconnects or the session ends."""
        while True:
            frame_text = await self._receive()
            if frame_text is None:
                return
            self._is_answering = True
            reply = await self._answer_frame(frame_text)
            if reply is not None:
                await self._socket.send(reply)
            self._is_answering = False
            if self._tombstone is not None:
                await self._socket.close_with_reason(self._tombstone)
                return
            if reply is None or self._has_ended:
                return

    async def _receive(self) -> str | None:
        """Return the next frame, or None after a frame that ends the connection."""
        try:
            return await self._socket.receive()
        except SessionLostError as error:
            await self._socket.send(encode_frame("error", self._make_error_data(error)))
            return None

    async def _answer_frame(self, frame_text: str) -> bytes | None:
        """Return the reply, or None to end the connection."""
        try:
            return await self._answer_message(_parse_message(frame_text))
        except SessionLostError as error:
            self._has_ended = True
            return encode_frame("error", self._make_error_data(error))
        except ValidationError as error:
            return encode_frame("error", make_validation_error_data(error))
        except Exception as error:  # noqa: BLE001 - the socket and its session must survive
            return encode_frame("error", self._make_error_data(to_env_error(error)))

    def _try_answer_frame(self, frame_text: bytes) -> bytes | None:
        """Return the reply to a step or reset that needs no wait; otherwise None."""
        try:
            return self._try_answer_message(parse_json(frame_text))
        except (SessionLostError, orjson.JSONDecodeError):
            return None
        except Exception as error:  # noqa: BLE001 - the socket and its session must survive
            return encode_frame("error", self._make_error_data(to_env_error(error)))

    def _try_answer_message(self, message: Any) -> bytes | None:
        plain_step = _read_plain_step(message, self._is_upstream)
        if plain_step is None:
            args = _read_plain_reset(message)
            if args is None:
                return None
            return self._make_first_frame(self._immediate_calls.reset_now(self._session_id, args))
        action, step_index = plain_step
        if isinstance(action, dict) and self._mcp.takes_tool_step(action):
            return None
        encoded_action = action if isinstance(action, str) else encode_json(action, "an action")
        result = self._immediate_calls.step_now(self._session_id, encoded_action, step_index)
        return self._make_result_frame(result)

    async def _answer_message(self, message_json: JsonObject) -> bytes | None:
        plain_step = _read_plain_step(message_json, self._is_upstream)
        if plain_step is not None:
            return await self._answer_step(*plain_step)
        type_name = message_json.get("type", "")
        message_type = self._message_types.get(type_name) if isinstance(type_name, str) else None
        if message_type is None:
            raise InvalidCallError(
                f"Unknown message type: {shorten(str(type_name))}", ErrorCode.UNKNOWN_TYPE
            )
        message = message_type.model_validate(message_json)
        match message:
            case StepMessage():
                return await self._answer_step(message.data, 0)
            case LudusStepMessage():
                action = message.text if message.data is None else message.data
                if action is None or (message.text is not None and message.data is not None):
                    raise InvalidCallError("a step needs either data or text, got both or neither")
                return await self._answer_step(action, message.step_index, message.attempt_id)
            case ResetMessage():
                args = parse_reset_args(
                    message.data, self._sessions.description, ignores_unknown=self._is_upstream
                )
                return self._make_first_frame(await self._sessions.reset(self._session_id, args))
            case PlainMessage(type="state"):
                state = await self._sessions.state(self._session_id)
                return encode_frame("state", orjson.Fragment(state))
            case McpMessage():
                caller = McpCaller(
                    self._session_id, self._tools_session_id, belongs_to_connection=True
                )
                return encode_frame("mcp", await self._mcp.answer_always(message.data, caller))
        return None

    async def _answer_step(
        self, action: JsonObject | str, step_index: int, attempt_id: int = 0
    ) -> bytes:
        if isinstance(action, dict) and self._mcp.takes_tool_step(action):
            payload_json = await self._mcp.step(self._session_id, action)
            return encode_frame("observation", orjson.Fragment(payload_json))
        encoded_action = action if isinstance(action, str) else encode_json(action, "an action")
        result = await self._sessions.step(
            self._session_id, encoded_action, step_index, attempt_id=attempt_id
        )
        return self._make_result_frame(result)

    def _make_first_frame(self, result: EncodedResult) -> bytes:
        if self._is_upstream or not self._tools_session_id:
            return self._make_result_frame(result)
        payload = make_ludus_payload(result) | {"tools_session_id": self._tools_session_id}
        return encode_frame("observation", payload)

    def _make_result_frame(self, result: EncodedResult) -> bytes:
        payload = make_upstream_payload(result) if self._is_upstream else make_ludus_payload(result)
        return encode_frame("observation", payload)

    def _make_error_data(self, error: EnvError) -> JsonObject:
        return make_error_data(error, self._sessions, is_upstream=self._is_upstream)


def _parse_message(frame_text: str) -> JsonObject:
    try:
        message = parse_json(frame_text)
    except orjson.JSONDecodeError as error:
        raise InvalidCallError(f"Invalid JSON: {error}", ErrorCode.INVALID_JSON) from None
    if not isinstance(message, dict):
        raise SessionLostError(
            f"expected a JSON object, got {type(message).__name__}", ErrorCode.SESSION_ERROR
        )
    return message


def _read_plain_step(message: Any, is_upstream: bool) -> tuple[JsonObject | str, int] | None:
    """Return the action and the number of a step message without other keys; otherwise None."""
    if type(message) is not dict or message.get("type") != "step":
        return None
    action: JsonObject | str | None = message.get("data")
    if type(action) is not dict:
        action = None if is_upstream else message.get("text")
        if type(action) is not str:
            return None
    if len(message) == 2:
        return action, 0
    step_index = message.get("step_index")
    if is_upstream or len(message) != 3 or type(step_index) is not int or step_index < 0:
        return None
    return action, step_index


def _read_plain_reset(message: Any) -> ResetArgs | None:
    """Return the arguments of a reset message with only a seed; otherwise None."""
    if type(message) is not dict or len(message) != 2 or message.get("type") != "reset":
        return None
    reset_data = message.get("data")
    if type(reset_data) is not dict or len(reset_data) != 1:
        return None
    seed = reset_data.get("seed")
    return ResetArgs(seed) if type(seed) is int and seed >= 0 else None


def _bind_current_context(handler: DirectHandler) -> DirectHandler:
    """Return a handler that runs with the current trace span and request id, if there are any."""
    if not is_traced():
        return handler
    context = contextvars.copy_context()
    return lambda frame_text: context.run(handler, frame_text)
