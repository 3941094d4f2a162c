"""A server's end of one WebSocket: text frames in and out, each write bounded in time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.types import Message, Receive, Scope, Send

from ludus.proto.errors import ErrorCode, SessionLostError

ResultT = TypeVar("ResultT")

DIRECT_EXTENSION = "ludus.direct"
WRITE_TIMEOUT_S = 60.0
_MAX_EARLY_FRAMES = 4


class DirectConnection(Protocol):
    """What a server that knows `ludus.direct` offers (asgi/uvicorn_websocket.py)."""

    def answer_directly(self, handler: Callable[[bytes], bytes | None]) -> None:
        """Lets the handler see text frames first."""
        ...

    def write_at_once(self, frame: bytes) -> bool:
        """True when the text frame is on its way; False where that would take a wait."""
        ...

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Lets the callback know when the connection is lost."""
        ...


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
        """Returns when the handshake is answered."""
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
        """Returns when the frame is on its way.

        Raises:
            SocketGone: the client has left, or does not read.
        """
        if self.direct is None or not self.direct.write_at_once(frame):
            await self._write({"type": "websocket.send", "text": frame.decode()})

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Returns when the closing handshake has begun; a client that is gone is no error."""
        try:
            await self._write({"type": "websocket.close", "code": code, "reason": reason})
        except SocketGone:
            return

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

    def abandon(self) -> None:
        """Stops listening."""
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
