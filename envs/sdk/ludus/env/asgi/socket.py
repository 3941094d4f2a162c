"""A server's end of WebSockets: text frames in and out, each write bounded in time.

session ends --SessionEvents--> SessionSockets --> its socket closes and says why
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.types import Message, Receive, Scope, Send

from ludus.env.sessions.interface import SessionEvents
from ludus.env.sessions.tombstones import SessionEnd, SessionTombstone
from ludus.proto.errors import ErrorCode, SessionLostError

ResultT = TypeVar("ResultT")

DIRECT_EXTENSION = "ludus.direct"
WRITE_TIMEOUT_S = 60.0
_MAX_EARLY_FRAMES = 4
_MAX_REASON_BYTES = 123
"""What fits into a close frame."""
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


class DirectConnection(Protocol):
    """What a server that knows `ludus.direct` offers (asgi/uvicorn_websocket.py)."""

    def answer_directly(self, handler: Callable[[bytes], bytes | None]) -> None:
        """Let the handler see text frames first."""

    def write_at_once(self, frame: bytes) -> bool:
        """True when the text frame is on its way; False where that would take a wait."""

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Let the callback know when the connection is lost."""


class SocketGone(Exception):
    """The client has left, or reads no more."""


class AsgiSocket:
    """One connection."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.direct: DirectConnection | None = (scope.get("extensions") or {}).get(DIRECT_EXTENSION)
        """Short ways that other servers than ours do not offer."""
        self._receive = receive
        self._send = send
        self._early: deque[Message] = deque()
        self._next: asyncio.Task[Message] | None = None

    async def accept(self) -> None:
        """Answer the handshake."""
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})

    async def receive(self) -> str:
        """The next text frame.

        Raises:
            SocketGone: there will be none.
            SessionLostError: it is a binary frame, which this protocol does not know.
        """
        if self._early:
            message = self._early.popleft()
        elif self._next is not None:
            waiting, self._next = self._next, None
            message = await waiting
        else:
            message = await self._receive()
        if message["type"] == "websocket.disconnect":
            raise SocketGone
        text: str | None = message.get("text")
        if text is None:
            raise SessionLostError(
                "expected a text frame, got a binary one", ErrorCode.SESSION_ERROR
            )
        return text

    async def send(self, frame: bytes) -> None:
        """Send a text frame.

        Raises:
            SocketGone: the client has left, or does not read.
        """
        if self.direct is None or not self.direct.write_at_once(frame):
            await self._write({"type": "websocket.send", "text": frame.decode()})

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Begin the closing handshake; a client that is gone is no error."""
        try:
            await self._write({"type": "websocket.close", "code": code, "reason": reason})
        except SocketGone:
            return

    async def close_for(self, why: SessionTombstone) -> None:
        """Close, and say why the socket's session ended."""
        await self.close(_CLOSE_CODES[why.kind], close_text(why.reason))

    async def unless_gone(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The work's value; it is cancelled when the client leaves before it is there.

        Raises:
            SocketGone: the client has left.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if self._next is None and len(self._early) < _MAX_EARLY_FRAMES:
                    self._next = asyncio.ensure_future(_as_coroutine(self._receive))
                waiting: set[asyncio.Task[Any]] = {task}
                if self._next is not None:
                    waiting.add(self._next)
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                self._take_early()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # a refusal that nobody waits for any more was heard, too

    def abandon(self) -> None:
        """Stop listening."""
        if self._next is not None:
            self._next.cancel()

    def _take_early(self) -> None:
        if self._next is None or not self._next.done():
            return
        message, self._next = self._next.result(), None
        if message["type"] == "websocket.disconnect":
            raise SocketGone
        self._early.append(message)

    async def _write(self, message: Message) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._send(message)
        except (OSError, RuntimeError, TimeoutError) as error:
            # ASGI servers say "gone" with an OSError, and "closed already" with a RuntimeError.
            raise SocketGone from error


async def _as_coroutine(receive: Receive) -> Message:
    return await receive()


class SessionSocket(Protocol):
    """A socket that serves a session."""

    def session_ended(self, why: SessionTombstone) -> None:
        """Close the socket."""


class SessionSockets:
    """The sockets of one application by session, at most one for each."""

    def __init__(self, events: SessionEvents) -> None:
        self._sockets: dict[str, SessionSocket] = {}
        self._closing: set[str] = set()
        events.on_end.append(self._on_end)

    def claim(self, session_id: str, socket: SessionSocket) -> bool:
        """True when the session had no socket; it has this one now."""
        return self._sockets.setdefault(session_id, socket) is socket

    def leave(self, session_id: str) -> bool:
        """True when the session was to be closed as soon as its socket had left."""
        self._sockets.pop(session_id, None)
        is_closing = session_id in self._closing
        self._closing.discard(session_id)
        return is_closing

    def close_later(self, session_id: str) -> bool:
        """True when a socket holds the session, which shall be closed when it has left."""
        if session_id not in self._sockets:
            return False
        self._closing.add(session_id)
        return True

    def _on_end(self, session_id: str, why: SessionTombstone) -> None:
        socket = self._sockets.get(session_id)
        if socket is not None:
            socket.session_ended(why)


def close_text(reason: str) -> str:
    """The reason as far as a close frame holds it."""
    return reason.encode(errors="replace")[:_MAX_REASON_BYTES].decode(errors="ignore")
