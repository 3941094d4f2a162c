"""HTTP heads that are bounded in size and time, which uvicorn leaves to a proxy.

Without this, whoever reaches the port can fill the memory with one endless header, or hold
connections for ever that never send a request; no token is asked for before a head is whole.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers; what was read beyond them at once comes on top."""
HEAD_TIMEOUT_S = 20.0
"""From the connection, or from a further request's first byte, to the end of the head."""
_REFUSAL = (
    b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%s"
)


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's own protocol with bounded heads: uvicorn.Config(http=BoundedHttp)."""

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
        """Count what belongs to a head that does not end."""
        super().data_received(data)
        if not self._is_in_head or self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > self.max_head_bytes:
            self._refuse(
                b"431 Request Header Fields Too Large",
                b"expected a request line and headers of at most %d bytes, got more"
                % self.max_head_bytes,
            )

    def on_message_begin(self) -> None:
        """Begin to count a head."""
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = 0
        if self._head_timer is None:
            self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep headers; trailers behind a body come without bound and are of no use."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop counting: the head is whole."""
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            text = b"expected a whole request head within %d s, got none" % self.head_timeout_s
            self._refuse(b"408 Request Timeout", text)

    def _refuse(self, status: bytes, message: bytes) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        code = b"TIMEOUT" if status.startswith(b"408") else b"VALIDATION_ERROR"
        body = b'{"detail":{"message":"%s","code":"%s"}}' % (message, code)
        self.transport.write(_REFUSAL % (status, len(body), body))
        self.transport.close()
