"""The server's side of WebSockets: text frames, with a time limit for each write.

session ends --SessionEvents--> SessionSockets --> the socket sends the reason and closes
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope, Send

from ludus.env.asgi.uvicorn_protocols import DIRECT_EXTENSION, DirectWebSocketProtocol
from ludus.env.sessions.interface import Connection, SessionEvents, Sessions
from ludus.env.sessions.tombstones import SessionEnd, SessionTombstone
from ludus.proto.errors import ErrorCode, SessionLostError

ResultT = TypeVar("ResultT")
SessionEndCallback = Callable[[SessionTombstone], None]

WRITE_TIMEOUT_S = 60.0
_MAX_EARLY_FRAMES = 4
_MAX_REASON_BYTES = 123
"""Maximum size of the reason in a close frame."""
_NORMAL_CODE, _GOING_AWAY_CODE, _INTERNAL_ERROR_CODE = 1000, 1001, 1011
_CLOSE_CODE_BY_END = {
    SessionEnd.CLOSED: _NORMAL_CODE,
    SessionEnd.EPISODE_ENDED: _NORMAL_CODE,
    SessionEnd.CONNECTION_ENDED: _GOING_AWAY_CODE,
    SessionEnd.IDLE: _GOING_AWAY_CODE,
    SessionEnd.SHUTDOWN: _GOING_AWAY_CODE,
    SessionEnd.TIMEOUT: _INTERNAL_ERROR_CODE,
    SessionEnd.LOST: _INTERNAL_ERROR_CODE,
}


class SocketGoneError(Exception):
    """The client has disconnected, or has stopped reading."""


class AsgiSocket:
    """A server's side of one WebSocket connection."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions = scope.get("extensions") or {}
        self.direct_path: DirectWebSocketProtocol | None = extensions.get(DIRECT_EXTENSION)
        """Protocol of the direct path, which only our ASGI server supports."""
        self._receive = receive
        self._send = send
        self._early_messages: deque[Message] = deque()
        self._receive_task: asyncio.Task[Message] | None = None

    async def accept(self) -> None:
        """Accept the connection."""
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})

    async def receive(self) -> str:
        """Return the next text frame.

        Raises:
            SocketGoneError: the client has disconnected.
            SessionLostError: the frame is binary, which this protocol does not support.
        """
        if self._early_messages:
            message = self._early_messages.popleft()
        elif self._receive_task is not None:
            receive_task, self._receive_task = self._receive_task, None
            message = await receive_task
        else:
            message = await self._receive()
        if message["type"] == "websocket.disconnect":
            raise SocketGoneError
        text: str | None = message.get("text")
        if text is None:
            raise SessionLostError(
                "expected a text frame, got a binary frame", ErrorCode.SESSION_ERROR
            )
        return text

    async def send(self, frame: bytes) -> None:
        """Send a text frame.

        Raises:
            SocketGoneError: the client has disconnected, or does not read.
        """
        if self.direct_path is None or not self.direct_path.try_write(frame):
            await self._write({"type": "websocket.send", "text": frame.decode()})

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Start the closing handshake, or do nothing if the client has disconnected."""
        try:
            await self._write({"type": "websocket.close", "code": code, "reason": reason})
        except SocketGoneError:
            return

    async def close_with_reason(self, tombstone: SessionTombstone) -> None:
        """Close the connection and send the reason why its session ended."""
        await self.close(_CLOSE_CODE_BY_END[tombstone.kind], truncate_reason(tombstone.reason))

    async def run_while_connected(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of `call`, which is cancelled when the client disconnects.

        Raises:
            SocketGoneError: the client has disconnected.
        """
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                if self._receive_task is None and len(self._early_messages) < _MAX_EARLY_FRAMES:
                    self._receive_task = asyncio.ensure_future(_receive_message(self._receive))
                tasks: set[asyncio.Task[Any]] = {task}
                if self._receive_task is not None:
                    tasks.add(self._receive_task)
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                self._store_early_message()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # marks the error as retrieved, so that asyncio does not warn

    def stop_receiving(self) -> None:
        """Stop waiting for messages."""
        if self._receive_task is not None:
            self._receive_task.cancel()

    def _store_early_message(self) -> None:
        if self._receive_task is None or not self._receive_task.done():
            return
        message, self._receive_task = self._receive_task.result(), None
        if message["type"] == "websocket.disconnect":
            raise SocketGoneError
        self._early_messages.append(message)

    async def _write(self, message: Message) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._send(message)
        except (OSError, RuntimeError, TimeoutError) as error:
            # ASGI servers raise OSError for a lost and RuntimeError for a closed connection.
            raise SocketGoneError from error


@contextlib.asynccontextmanager
async def accept_socket(
    scope: Scope, receive: Receive, send: Send, sessions: Sessions
) -> AsyncIterator[tuple[AsgiSocket, Connection]]:
    """Accept a WebSocket and yield it. At the end, close it and release its sessions."""
    socket, connection = AsgiSocket(scope, receive, send), Connection()
    if socket.direct_path is not None:
        socket.direct_path.set_close_callback(lambda: sessions.release(connection))
    try:
        await socket.accept()
        yield socket, connection
        await socket.close()
    except SocketGoneError:
        return
    finally:
        socket.stop_receiving()
        sessions.release(connection)


async def _receive_message(receive: Receive) -> Message:
    return await receive()


class SessionSockets:
    """The sockets of one application, at most one per session."""

    def __init__(self, events: SessionEvents) -> None:
        self._callbacks: dict[str, SessionEndCallback] = {}
        self._ids_to_close: set[str] = set()
        events.on_end.append(self._on_end)

    def claim(self, session_id: str, on_end: SessionEndCallback) -> bool:
        """Register a session's socket, or return False if the session already has a socket.

        Args:
            on_end: called when the session has ended, to close the socket.
        """
        return self._callbacks.setdefault(session_id, on_end) == on_end

    def remove(self, session_id: str) -> bool:
        """Remove a session's socket, and return True if the session must be closed now."""
        self._callbacks.pop(session_id, None)
        must_close = session_id in self._ids_to_close
        self._ids_to_close.discard(session_id)
        return must_close

    def close_later(self, session_id: str) -> bool:
        """Make `remove` return True for the session. Return False if the session has no socket."""
        if session_id not in self._callbacks:
            return False
        self._ids_to_close.add(session_id)
        return True

    def _on_end(self, session_id: str, tombstone: SessionTombstone) -> None:
        if on_end := self._callbacks.get(session_id):
            on_end(tombstone)


def truncate_reason(reason: str) -> str:
    """Return the part of the reason that fits into a close frame."""
    return reason.encode(errors="replace")[:_MAX_REASON_BYTES].decode(errors="ignore")
