"""The WebSocket protocol of uvicorn with a direct path for frames that need no wait.

    bytes --> parser --> frame --+--> queue --> task of the connection --> send
                                 |
                                 +--> direct handler --> bytes     no task, no queue

The direct path is used only while the connection's task waits for a frame and the client reads its
replies. Replies therefore keep their order and do not accumulate. A connection that does not close
in time is aborted, because a peer that no longer reads would keep it open forever. A disconnected
peer is reported immediately, even while its last call is running.
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
_ABORT_AFTER_S = 0.5
"""Time for the close frame to arrive before the connection is aborted."""
_SHUTTING_DOWN = "the server is shutting down"
DirectHandler = Callable[[bytes], bytes | None]
"""Returns the reply to a text frame, or None to pass the frame to the connection's task."""


class DirectWebSocketProtocol(WebSocketsSansIOProtocol):
    """A connection that offers itself to the application as the extension `ludus.direct`."""

    _direct: DirectHandler | None = None
    _close_callback: Callable[[], None] | None = None
    _is_app_waiting = False

    def set_direct_handler(self, handler: DirectHandler) -> None:
        """Pass text frames to the handler first."""
        self._direct = handler

    def set_close_callback(self, callback: Callable[[], None]) -> None:
        """Call the callback when the connection is lost."""
        self._close_callback = callback

    def write_now(self, frame: bytes) -> bool:
        """Send a text frame and return True, or return False if that requires a wait."""
        if not self._can_write():
            return False
        self.conn.send_text(frame)
        self.transport.write(b"".join(self.conn.data_to_send()))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the connection's task and the callback."""
        super().connection_lost(exc)
        self._direct = None
        callback, self._close_callback = self._close_callback, None
        if callback is not None:
            callback()

    def handle_connect(self, event: Request) -> None:
        """Start the connection's task and offer it the direct path."""
        super().handle_connect(event)
        if not self.handshake_complete:
            extensions: dict[str, Any] = self.scope["extensions"]
            extensions[DIRECT_EXTENSION] = self

    def handle_text(self, event: Frame) -> None:
        """Answer the frame, or queue it."""
        if (
            self._direct is not None
            and event.fin
            and self._is_app_waiting
            and self.queue.empty()
            and self._can_write()
        ):
            reply = self._direct(bytes(event.data))
            if reply is not None:
                self.write_now(reply)
                return
        super().handle_text(event)

    async def receive(self) -> Any:
        """Return the next event for the connection's task."""
        self._is_app_waiting = True
        try:
            return await super().receive()
        finally:
            self._is_app_waiting = False

    def shutdown(self) -> None:
        """Close the connection with the reason that the server is shutting down."""
        if not self.handshake_complete or self.conn.state is not State.OPEN:
            super().shutdown()
            return
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": GOING_AWAY})
        self.conn.send_close(GOING_AWAY, _SHUTTING_DOWN)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()

    def keepalive_timeout(self) -> None:
        """Abort a connection whose peer does not respond to a ping."""
        super().keepalive_timeout()
        self.loop.call_later(_ABORT_AFTER_S, self.transport.abort)

    def on_task_complete(self, task: Task[None]) -> None:
        """Abort the connection if it has not closed in time."""
        super().on_task_complete(task)
        if not self.disconnected:
            self.loop.call_later(self.close_timeout, self.transport.abort)

    def _can_write(self) -> bool:
        is_open = self.conn.state is State.OPEN and not self.disconnected
        return is_open and self.writable.is_set()
