"""OpenEnv's WebSocket `/ws`: one connection is one session, one reply per message.

    frame --> plain step or reset? --> environment on this loop? --> frame, without a task
                |  no                    |  no
                +--> strict message models --> Sessions ------> frame

A frame is sent only as the reply to a message, because upstream clients take any frame for
their reply; the one exception is the refusal of a connection, which OpenEnv sends first.
When its session ends while the socket is open, the close frame says why.
`/ws?session_id=<id>` serves a session that exists already and leaves it behind; `?ludus=1`
asks for our extras, and `&text=0` for them without the text view.

Who waits for whom: a connection is accepted at once and then waits for a free session; a
client that leaves meanwhile stops waiting.
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

from ludus.env.asgi.sessions import EvictableSessions
from ludus.env.asgi.socket import AsgiSocket, SessionSockets, SocketGone
from ludus.env.encoding import EncodedResult, ResetArgs
from ludus.env.mcp.server import McpCaller, McpServer
from ludus.env.messages.openenv import (
    CloseMessage,
    LudusStepMessage,
    McpMessage,
    ResetMessage,
    StateMessage,
    StepMessage,
    action_json,
    error_data,
    frame,
    ludus_payload,
    observation_frame,
    reset_args,
    validation_error_data,
)
from ludus.env.security.tracing import is_traced
from ludus.env.sessions.interface import Connection, OpenArgs, Opened, Sessions
from ludus.env.sessions.tombstones import SessionTombstone
from ludus.env.types import JsonObject
from ludus.proto.errors import (
    AuthenticationError,
    EnvError,
    ErrorCode,
    InvalidCallError,
    SessionLostError,
    to_env_error,
)

_MAX_SHOWN_CHARS = 200
_MESSAGE_TYPES: dict[str, type[BaseModel]] = {
    "reset": ResetMessage,
    "step": StepMessage,
    "state": StateMessage,
    "close": CloseMessage,
    "mcp": McpMessage,
}
_LUDUS_MESSAGE_TYPES = _MESSAGE_TYPES | {"step": LudusStepMessage}


class WebSocketWire:
    """The ASGI application behind `/ws`."""

    def __init__(
        self, sessions: Sessions, sockets: SessionSockets, spare: EvictableSessions, mcp: McpServer
    ) -> None:
        self._sessions = sessions
        self._sockets = sockets
        self._spare = spare
        self._mcp = mcp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the connection until it ends, then free its session or leave it behind."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        upstream = query.get("ludus") != ["1"]
        with_text = not upstream and query.get("text") != ["0"]
        wanted = query.get("session_id", [""])[0]
        socket = AsgiSocket(scope, receive, send)
        connection = Connection()
        if socket.direct is not None:
            socket.direct.when_gone(lambda: self._sessions.release(connection))
        try:
            await socket.accept()
            try:
                opened = (
                    Opened(wanted, None)
                    if wanted
                    else await self._open(socket, connection, with_text)
                )
                conversation = _Conversation(socket, self._sessions, self._mcp, opened, upstream)
                await self._serve(conversation, opened.session_id, is_guest=bool(wanted))
            except EnvError as error:
                data = error_data(error, self._sessions, upstream=upstream)
                await socket.send(frame("error", data))
            await socket.close()
        except SocketGone:
            return
        finally:
            socket.abandon()
            self._sessions.release(connection)

    async def _open(self, socket: AsgiSocket, connection: Connection, with_text: bool) -> Opened:
        return await socket.unless_gone(
            self._sessions.open(OpenArgs(with_text=with_text), connection)
        )

    async def _serve(self, conversation: _Conversation, session_id: str, *, is_guest: bool) -> None:
        """Serve the conversation; a guest leaves the session behind, which was there before it."""
        if is_guest:
            await self._check_exists(session_id)
        if not self._sockets.claim(session_id, conversation):
            raise SessionLostError(
                f"Session {session_id} already has an attached WebSocket", ErrorCode.SESSION_ERROR
            )
        try:
            await conversation.serve()
        finally:
            must_close = self._sockets.leave(session_id) or not is_guest
            if must_close:
                await self._sessions.close(session_id)

    async def _check_exists(self, session_id: str) -> None:
        try:
            await self._sessions.state(session_id)
        except (SessionLostError, AuthenticationError):
            raise SessionLostError(
                f"Unknown session_id: {_shown(session_id)}", ErrorCode.SESSION_ERROR
            ) from None
        self._spare.used(session_id)


class _Conversation:
    """The conversation on one socket."""

    def __init__(
        self,
        socket: AsgiSocket,
        sessions: Sessions,
        mcp: McpServer,
        opened: Opened,
        upstream: bool,
    ) -> None:
        self._socket = socket
        self._sessions = sessions
        self._mcp = mcp
        self._session_id = opened.session_id
        self._tools_session_id = opened.tools_session_id
        self._upstream = upstream
        self._message_types = _MESSAGE_TYPES if upstream else _LUDUS_MESSAGE_TYPES
        self._is_answering = False
        self._is_over = False
        self._ended: SessionTombstone | None = None
        self._closing: asyncio.Task[None] | None = None
        direct, immediate = socket.direct, sessions.immediate
        if direct is not None and immediate is not None:
            self._immediate = immediate
            direct.answer_directly(_within_this_context(self._answer_now))

    def session_ended(self, why: SessionTombstone) -> None:
        """Close the socket, after the reply to a call that still runs."""
        self._ended = why
        if not self._is_answering:
            self._closing = asyncio.get_running_loop().create_task(self._socket.close_for(why))

    async def serve(self) -> None:
        """Answer frames until the client or the session is done."""
        while True:
            text = await self._receive()
            if text is None:
                return
            self._is_answering = True
            reply = await self._answer(text)
            if reply is not None:
                await self._socket.send(reply)
            self._is_answering = False
            if self._ended is not None:
                await self._socket.close_for(self._ended)
                return
            if reply is None or self._is_over:
                return

    async def _receive(self) -> str | None:
        """The next frame; None after one that ends the conversation."""
        try:
            return await self._socket.receive()
        except SessionLostError as error:
            await self._socket.send(frame("error", self._error_data(error)))
            return None

    async def _answer(self, text: str) -> bytes | None:
        """The reply; None ends the conversation."""
        try:
            return await self._reply_to(_read(text))
        except SessionLostError as error:
            self._is_over = True
            return frame("error", self._error_data(error))
        except ValidationError as error:
            return frame("error", validation_error_data(error))
        except Exception as error:  # noqa: BLE001 - the socket and its session live on
            return frame("error", self._error_data(to_env_error(error)))

    def _answer_now(self, text: bytes) -> bytes | None:
        """The reply to a step or reset that takes no wait; None for whatever takes more."""
        try:
            return self._reply_now(orjson.loads(text))
        except (SessionLostError, orjson.JSONDecodeError):
            return None
        except Exception as error:  # noqa: BLE001 - the socket and its session live on
            return frame("error", self._error_data(to_env_error(error)))

    def _reply_now(self, message: Any) -> bytes | None:
        plain = _plain_step(message, self._upstream)
        if plain is None:
            args = _plain_reset(message)
            if args is None:
                return None
            return self._first(self._immediate.reset_now(self._session_id, args))
        action, step_index = plain
        if isinstance(action, str):
            result = self._immediate.step_now(self._session_id, action, step_index)
        elif self._mcp.understands(action):
            return None
        else:
            encoded = action_json(action)
            result = self._immediate.step_now(self._session_id, encoded, step_index)
        return self._observation(result)

    async def _reply_to(self, raw: JsonObject) -> bytes | None:
        plain = _plain_step(raw, self._upstream)
        if plain is not None:
            return await self._step(*plain)
        kind = raw.get("type", "")
        message_type = self._message_types.get(kind) if isinstance(kind, str) else None
        if message_type is None:
            raise InvalidCallError(f"Unknown message type: {_shown(kind)}", ErrorCode.UNKNOWN_TYPE)
        message = message_type.model_validate(raw)
        match message:
            case StepMessage():
                return await self._step(message.data, 0)
            case LudusStepMessage():
                return await self._ludus_step(message)
            case ResetMessage():
                args = reset_args(message.data, self._sessions.description, lenient=self._upstream)
                return self._first(await self._sessions.reset(self._session_id, args))
            case StateMessage():
                state = await self._sessions.state(self._session_id)
                return frame("state", orjson.Fragment(state))
            case McpMessage():
                caller = McpCaller(self._session_id, self._tools_session_id, is_managed=True)
                return frame("mcp", await self._mcp.reply(message.data, caller))
        return None

    async def _step(self, action: JsonObject | str, step_index: int) -> bytes:
        if isinstance(action, str):
            step = self._sessions.step(self._session_id, action, step_index)
            return self._observation(await step)
        if self._mcp.understands(action):
            data = await self._mcp.step(self._session_id, action)
            return frame("observation", orjson.Fragment(data))
        step = self._sessions.step(self._session_id, action_json(action), step_index)
        return self._observation(await step)

    async def _ludus_step(self, message: LudusStepMessage) -> bytes:
        if (message.text is None) == (message.data is None):
            raise InvalidCallError("expected data or text in a step, got both or neither")
        if message.data is not None:
            return await self._step(message.data, message.step_index)
        assert message.text is not None, "one of the two is there"
        return await self._step(message.text, message.step_index)

    def _first(self, result: EncodedResult) -> bytes:
        if self._upstream or not self._tools_session_id:
            return self._observation(result)
        payload = ludus_payload(result) | {"tools_session_id": self._tools_session_id}
        return frame("observation", payload)

    def _observation(self, result: EncodedResult) -> bytes:
        if self._upstream:
            return observation_frame(result)
        return frame("observation", ludus_payload(result))

    def _error_data(self, error: EnvError) -> JsonObject:
        return error_data(error, self._sessions, upstream=self._upstream)


def _read(text: str) -> JsonObject:
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
    """Action or text, and number, of a step that has exactly the keys it needs, else None."""
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
    """The arguments of a reset that gives a seed and nothing else, else None."""
    if type(message) is not dict or len(message) != 2 or message.get("type") != "reset":
        return None
    data = message.get("data")
    if type(data) is not dict or len(data) != 1:
        return None
    seed = data.get("seed")
    return ResetArgs(seed) if type(seed) is int and seed >= 0 else None


def _within_this_context(
    handler: Callable[[bytes], bytes | None],
) -> Callable[[bytes], bytes | None]:
    """The handler, which runs with the caller's span and request id, if there are any."""
    if not is_traced():
        return handler
    context = contextvars.copy_context()
    return lambda text: context.run(handler, text)


def _shown(given: Any) -> str:
    shown = str(given)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}..."
