"""Protocols of our HTTP server, which extend those of uvicorn: limited heads and a direct path.

    bytes --> WebSocket parser --> frame --+--> queue --> task of the connection --> send
                                           |
                                           +--> direct handler --> bytes     no task, no queue

uvicorn expects a proxy to limit the size and time of request heads. The server can check a token
only when the head is complete. Without limits, any client could fill the memory with one endless
header, or keep connections open without ever sending a request.

The direct path answers frames that can be answered immediately. It is used only while the
connection's task waits for a frame and the client reads its replies. Replies therefore keep their
order and do not accumulate. A connection that does not close in time is aborted, because a peer
that has stopped reading would keep it open forever. A disconnect is reported immediately, even
while a call is running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.protocol import State

DIRECT_EXTENSION = "ludus.direct"
MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of the request line and headers."""
HEAD_TIMEOUT_S = 20.0
"""Time limit for a head. It starts with the connection, or with a later request's first byte."""
_REFUSAL_TEMPLATE = (
    b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%s"
)
_PIECE_BYTES = 1024
"""Maximum number of bytes that are parsed at once."""
_HEADER_MARKS_BYTES = 4
"""Number of bytes of the marks of a header: a colon, a space and the end of the line."""
GOING_AWAY_CODE = 1001
MESSAGE_TOO_BIG_CODE = 1009
MAX_FRAGMENTS = 1024
"""Maximum number of fragments of a WebSocket message. A fragment costs ten microseconds."""
_FRAGMENTS_REASON = f"a message must have at most {MAX_FRAGMENTS} fragments"
_ABORT_DELAY_S = 0.5
"""Time for the close frame to arrive before the connection is aborted."""
_SHUTDOWN_REASON = "the server is shutting down"
DirectHandler = Callable[[bytes], bytes | None]
"""Returns the reply to a text frame, or None to pass the frame to the connection's task."""


class _LongHeadError(Exception):
    """Stops the parser at a head that is too long. uvicorn takes it for a malformed request."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """An HTTP protocol for uvicorn with limited heads, for the option `http` of its `Config`.

    A head is measured twice: by its parsed parts, and by the bytes that were read, because the
    parser passes a line on only when the line is complete, and drops white space. Received data is
    parsed in short pieces, so that the bytes of a head are nearly exact.

    The bytes between two parts of a body are limited, too: chunk sizes, extensions and trailers.
    """

    max_head_bytes = MAX_HEAD_BYTES
    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_reading_head = True
        self._num_head_bytes = 0
        """Number of bytes that were read of an incomplete head."""
        self._num_parsed_bytes = 0
        """Number of bytes in the parsed parts of the head."""
        self._num_marks_bytes = 0
        """Number of bytes that were read since the last part of the body."""
        self._is_reading_body = False
        self._has_body = False
        """True if a part of a body was in the piece that is being parsed."""
        self._has_ended_message = False
        """True if a message ended in the piece that is being parsed."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            self._parse_piece(data[start : start + _PIECE_BYTES])
            # The connection may have been closed, or have become a WebSocket.
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return

    def _parse_piece(self, piece: bytes) -> None:
        self._has_body = self._has_ended_message = False
        super().data_received(piece)
        # A piece in which another message ended belongs to that message in part.
        if self._has_ended_message or self.transport.is_closing():
            return
        if self._is_reading_body:
            self._num_marks_bytes = 0 if self._has_body else self._num_marks_bytes + len(piece)
            if self._num_marks_bytes > self.max_head_bytes:
                self._refuse_long_marks()
        else:
            self._num_head_bytes += len(piece)
            if self._num_head_bytes > self.max_head_bytes:
                self._refuse_long_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request, or one whose head is too long."""
        if self._num_parsed_bytes > self.max_head_bytes:
            self._refuse_long_head()
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_reading_head = True
        self._num_head_bytes = self._num_parsed_bytes = self._num_marks_bytes = 0
        if self._head_timer is None:
            self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        self._count_parsed(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep headers, and ignore trailers after a body, which are unused."""
        if self._is_reading_head:
            self._count_parsed(len(name) + len(value) + _HEADER_MARKS_BYTES)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_reading_head, self._is_reading_body = False, True
        self._stop_head_timer()
        if not self.url.startswith(b"/"):
            self._use_host_of_url()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_ended_message, self._is_reading_body = True, False
        super().on_message_complete()

    def _use_host_of_url(self) -> None:
        """Replace the header `host` by the host of an absolute URL, as RFC 9112 (3.2.2) requires.

        Checks of the header would otherwise see another host than the URL names.
        """
        url = httptools.parse_url(self.url)
        if url.host is not None:
            host = b"[%s]" % url.host if b":" in url.host else url.host
            port = b"" if url.port is None else b":%d" % url.port
            self.headers[:] = [header for header in self.headers if header[0] != b"host"]
            self.headers.append((b"host", host + port))

    def _count_parsed(self, num_bytes: int) -> None:
        self._num_parsed_bytes += num_bytes
        if self._num_parsed_bytes > self.max_head_bytes:
            raise _LongHeadError

    def _refuse_long_head(self) -> None:
        self._refuse(
            b"431 Request Header Fields Too Large",
            b"the request line and headers must have at most %d bytes" % self.max_head_bytes,
        )

    def _refuse_long_marks(self) -> None:
        message = b"a body must have at most %d bytes between two of its parts"
        cycle = self.cycle
        if not cycle.response_started:
            status = b"431 Request Header Fields Too Large"
            self._refuse(status, message % self.max_head_bytes)
        cycle.disconnected = True
        cycle.message_event.set()
        self.transport.close()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._refuse_late_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_late_head(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            message = b"the request head was not complete within %d s" % self.head_timeout_s
            self._refuse(b"408 Request Timeout", message)

    def _refuse(self, status: bytes, message: bytes) -> None:
        self._is_reading_head = False
        self._stop_head_timer()
        code = b"TIMEOUT" if status.startswith(b"408") else b"VALIDATION_ERROR"
        body = b'{"detail":{"message":"%s","code":"%s"}}' % (message, code)
        self.transport.write(_REFUSAL_TEMPLATE % (status, len(body), body))
        self.transport.close()


class DirectWebSocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket protocol that the application can use directly, as extension `ludus.direct`."""

    _direct_handler: DirectHandler | None = None
    _close_callback: Callable[[], None] | None = None
    _is_app_waiting = False

    def set_direct_handler(self, handler: DirectHandler) -> None:
        """Pass text frames to the handler first."""
        self._direct_handler = handler

    def set_close_callback(self, callback: Callable[[], None]) -> None:
        """Call the callback when the connection is lost."""
        self._close_callback = callback

    def try_write(self, frame: bytes) -> bool:
        """Send a text frame and return True, or return False if that would need a wait."""
        if not self._can_write():
            return False
        self.conn.send_text(frame)
        self.transport.write(b"".join(self.conn.data_to_send()))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._direct_handler = None
        close_callback, self._close_callback = self._close_callback, None
        if close_callback is not None:
            close_callback()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.handshake_complete:
            extensions: dict[str, Any] = self.scope["extensions"]
            extensions[DIRECT_EXTENSION] = self

    def handle_cont(self, event: Frame) -> None:
        """Keep a fragment, or refuse a message whose fragments cost more time than its bytes."""
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        elif self.conn.state is State.OPEN:
            self.frames = []
            self.conn.fail(MESSAGE_TOO_BIG_CODE, _FRAGMENTS_REASON)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def handle_text(self, event: Frame) -> None:
        if (
            self._direct_handler is not None
            and event.fin
            and self._is_app_waiting
            and self.queue.empty()
            and self._can_write()
        ):
            reply = self._direct_handler(bytes(event.data))
            if reply is not None:
                self.try_write(reply)
                return
        super().handle_text(event)

    async def receive(self) -> Any:
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
        self.queue.put_nowait({"type": "websocket.disconnect", "code": GOING_AWAY_CODE})
        self.conn.send_close(GOING_AWAY_CODE, _SHUTDOWN_REASON)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()

    def keepalive_timeout(self) -> None:
        """Abort a connection whose peer does not respond to a ping."""
        super().keepalive_timeout()
        self.loop.call_later(_ABORT_DELAY_S, self.transport.abort)

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Abort the connection if it has not closed in time."""
        super().on_task_complete(task)
        if not self.disconnected:
            self.loop.call_later(self.close_timeout, self.transport.abort)

    def _can_write(self) -> bool:
        is_open = self.conn.state is State.OPEN and not self.disconnected
        return is_open and self.writable.is_set()
