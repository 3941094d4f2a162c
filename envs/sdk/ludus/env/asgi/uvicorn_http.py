"""Limits on the size and time of HTTP request heads, which uvicorn leaves to a proxy.

The server checks the token only after a complete head. Without limits, any client could fill the
memory with one endless header, or keep connections open without ever sending a request.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of the request line and headers, checked after each read."""
HEAD_TIMEOUT_S = 20.0
"""Time limit for a head, from the connection or from the first byte of a later request."""
_REFUSAL = (
    b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%s"
)


class BoundedHttp(HttpToolsProtocol):
    """The protocol of uvicorn with limits on heads: `uvicorn.Config(http=BoundedHttp)`."""

    max_head_bytes = MAX_HEAD_BYTES
    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data and count the bytes of an incomplete head."""
        super().data_received(data)
        if not self._is_in_head or self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > self.max_head_bytes:
            self._refuse(
                b"431 Request Header Fields Too Large",
                b"the request line and headers must have at most %d bytes" % self.max_head_bytes,
            )

    def on_message_begin(self) -> None:
        """Start to count the bytes of a head."""
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = 0
        if self._head_timer is None:
            self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep headers, and ignore trailers after a body, which have no limit and no use."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop counting, because the head is complete."""
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._refuse_late_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_late_head(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            text = b"the request head was not complete within %d s" % self.head_timeout_s
            self._refuse(b"408 Request Timeout", text)

    def _refuse(self, status: bytes, message: bytes) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        code = b"TIMEOUT" if status.startswith(b"408") else b"VALIDATION_ERROR"
        body = b'{"detail":{"message":"%s","code":"%s"}}' % (message, code)
        self.transport.write(_REFUSAL % (status, len(body), body))
        self.transport.close()
