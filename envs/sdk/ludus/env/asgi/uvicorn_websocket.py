"""uvicorn's WebSocket protocol, with a short way for frames that are answered at once.

    bytes --> parser --> frame --+--> queue --> task of the connection --> send
                                 |
                                 +--> direct handler --> bytes     no task, no queue

The short way is taken only while the connection's task waits for a frame and the client
reads what it is sent, so replies keep their order and nothing piles up. A connection that
does not close in time is cut, else a peer that has stopped reading would hold it for ever.
A peer that has left is reported at once, also while its last call still runs.
"""

from __future__ import annotations

from asyncio import Task
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.protocol import State

from ludus.env.asgi.socket import DIRECT_EXTENSION

GOING_AWAY = 1001
_CUT_AFTER_S = 0.5  # the close frame may still arrive
_SHUTTING_DOWN = "the server is shutting down"
DirectHandler = Callable[[bytes], bytes | None]
"""The reply to a text frame, or None to let the connection's task answer it."""


class DirectWebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection, which is itself the value of `scope["extensions"]["ludus.direct"]`."""

    _direct: DirectHandler | None = None
    _when_gone: Callable[[], None] | None = None
    _is_app_waiting = False

    def answer_directly(self, handler: DirectHandler) -> None:
        """Let the handler see text frames first."""
        self._direct = handler

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Let the callback know when the connection is lost."""
        self._when_gone = callback

    def write_at_once(self, frame: bytes) -> bool:
        """True when the text frame is on its way; False where that would take a wait."""
        if not self._can_write():
            return False
        self.conn.send_text(frame)
        self.transport.write(b"".join(self.conn.data_to_send()))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the connection's task, and whoever wants to know at once."""
        super().connection_lost(exc)
        self._direct = None
        gone, self._when_gone = self._when_gone, None
        if gone is not None:
            gone()

    def handle_connect(self, event: Request) -> None:
        """Start the connection's task and offer it the short way."""
        super().handle_connect(event)
        if not self.handshake_complete:
            extensions: dict[str, Any] = self.scope["extensions"]  # type: ignore[assignment]
            extensions[DIRECT_EXTENSION] = self

    def handle_text(self, event: Frame) -> None:
        """Answers the frame, or queues it."""
        if (
            self._direct is not None
            and event.fin
            and self._is_app_waiting
            and self.queue.empty()
            and self._can_write()
        ):
            reply = self._direct(bytes(event.data))
            if reply is not None:
                self.write_at_once(reply)
                return
        super().handle_text(event)

    async def receive(self) -> Any:
        """The next event for the connection's task."""
        self._is_app_waiting = True
        try:
            return await super().receive()
        finally:
            self._is_app_waiting = False

    def shutdown(self) -> None:
        """Close the connection and say that the server goes."""
        if not self.handshake_complete or self.conn.state is not State.OPEN:
            super().shutdown()
            return
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": GOING_AWAY})
        self.conn.send_close(GOING_AWAY, _SHUTTING_DOWN)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()

    def keepalive_timeout(self) -> None:
        """Cut a connection whose peer answers no ping."""
        super().keepalive_timeout()
        self.loop.call_later(_CUT_AFTER_S, self.transport.abort)

    def on_task_complete(self, task: Task[None]) -> None:
        """Cut the connection if it has not closed in time."""
        super().on_task_complete(task)
        if not self.disconnected:
            self.loop.call_later(self.close_timeout, self.transport.abort)

    def _can_write(self) -> bool:
        is_open = self.conn.state is State.OPEN and not self.disconnected
        return is_open and self.writable.is_set()
