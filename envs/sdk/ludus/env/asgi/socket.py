"""The server's side of WebSockets: text frames, with a time limit for each write.

session ends --SessionEvents--> SessionSockets --> the socket closes and sends the reason
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
OnSessionEnd = Callable[[SessionTombstone], None]

WRITE_TIMEOUT_S = 60.0
_MAX_EARLY_FRAMES = 4
_MAX_REASON_BYTES = 123
"""Maximum size of the reason in a close frame."""
_NORMAL, _GOING_AWAY, _INTERNAL_ERROR = 1000, 1001, 1011
_CLOSE_CODES = {
    SessionEnd.CLOSED: _NORMAL,
    SessionEnd.EPISODE_ENDED: _NORMAL,
    SessionEnd.CONNECTION_ENDED: _GOING_AWAY,
    SessionEnd.IDLE: _GOING_AWAY,
    SessionEnd.SHUTDOWN: _GOING_AWAY,
    SessionEnd.TIMEOUT: _INTERNAL_ERROR,
    SessionEnd.LOST: _INTERNAL_ERROR,
}


class SocketGoneError(Exception):
    """The client has disconnected, or it no longer reads."""


class AsgiSocket:
    """A server's side of one WebSocket connection."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions = scope.get("extensions") or {}
        self.direct: DirectWebSocketProtocol | None = extensions.get(DIRECT_EXTENSION)
        """The direct path, which only our ASGI server supports."""
        self._receive = receive
        self._send = send
        self._early: deque[Message] = deque()
        self._next: asyncio.Task[Message] | None = None

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
        if self._early:
            message = self._early.popleft()
        elif self._next is not None:
            receiving, self._next = self._next, None
            message = await receiving
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
        if self.direct is None or not self.direct.write_now(frame):
            await self._write({"type": "websocket.send", "text": frame.decode()})

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Start the closing handshake. A client that has disconnected is not an error."""
        try:
            await self._write({"type": "websocket.close", "code": code, "reason": reason})
        except SocketGoneError:
            return

    async def close_with_reason(self, tombstone: SessionTombstone) -> None:
        """Close the connection and send the reason why its session ended."""
        await self.close(_CLOSE_CODES[tombstone.kind], cut_close_reason(tombstone.reason))

    async def run_while_connected(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the value of `work`, which is cancelled when the client disconnects.

        Raises:
            SocketGoneError: the client has disconnected.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if self._next is None and len(self._early) < _MAX_EARLY_FRAMES:
                    self._next = asyncio.ensure_future(_as_coroutine(self._receive))
                tasks: set[asyncio.Task[Any]] = {task}
                if self._next is not None:
                    tasks.add(self._next)
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                self._take_early()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # marks the error as retrieved, so that asyncio does not warn

    def abandon(self) -> None:
        """Stop listening."""
        if self._next is not None:
            self._next.cancel()

    def _take_early(self) -> None:
        if self._next is None or not self._next.done():
            return
        message, self._next = self._next.result(), None
        if message["type"] == "websocket.disconnect":
            raise SocketGoneError
        self._early.append(message)

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
    """Accept a WebSocket; then close it, and release the sessions that end with it."""
    socket, connection = AsgiSocket(scope, receive, send), Connection()
    if socket.direct is not None:
        socket.direct.set_close_callback(lambda: sessions.release(connection))
    try:
        await socket.accept()
        yield socket, connection
        await socket.close()
    except SocketGoneError:
        return
    finally:
        socket.abandon()
        sessions.release(connection)


async def _as_coroutine(receive: Receive) -> Message:
    return await receive()


class SessionSockets:
    """The sockets of one application by session, at most one socket per session."""

    def __init__(self, events: SessionEvents) -> None:
        self._callbacks: dict[str, OnSessionEnd] = {}
        self._closing: set[str] = set()
        events.on_end.append(self._on_end)

    def claim(self, session_id: str, on_end: OnSessionEnd) -> bool:
        """Register a session's socket, or return False if the session already has a socket.

        Args:
            on_end: called when the session has ended, to close the socket.
        """
        return self._callbacks.setdefault(session_id, on_end) == on_end

    def remove(self, session_id: str) -> bool:
        """Remove a session's socket, and return True if the session must be closed now."""
        self._callbacks.pop(session_id, None)
        is_closing = session_id in self._closing
        self._closing.discard(session_id)
        return is_closing

    def close_later(self, session_id: str) -> bool:
        """Close the session after its socket is removed, or return False if it has no socket."""
        if session_id not in self._callbacks:
            return False
        self._closing.add(session_id)
        return True

    def _on_end(self, session_id: str, tombstone: SessionTombstone) -> None:
        if on_end := self._callbacks.get(session_id):
            on_end(tombstone)


def cut_close_reason(reason: str) -> str:
    """Return the part of the reason that fits into a close frame."""
    return reason.encode(errors="replace")[:_MAX_REASON_BYTES].decode(errors="ignore")
