"""A client's WebSocket that delivers replies without a task, a lock or a queue.

    request --> frame --> socket      socket --> parser --> frame --+--> on_reply
                                                                    |
                                   fragments, unexpected frames ----+--> send and recv

The direct path is used only while no frame waits to be read, so that an unexpected frame is never
taken for a reply. The module uses names of websockets that may change with its version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.frames import DATA_OPCODES, Frame, Opcode
from websockets.protocol import Event, State

OnReply = Callable[[str | None], Any]
"""Callback for one reply. None means that `recv` returns the reply or raises the reason why there
is none. Must not raise."""


class CallConnection(ClientConnection):
    """A connection on which each message gets one reply before the next message is sent."""

    _on_reply: OnReply | None = None
    _has_unread = False
    """True after the first frame that `recv` has to read."""

    def send_request(self, message: bytes, on_reply: OnReply) -> bool:
        """Send a text and return True if its reply will be passed to `on_reply`.

        False means that the caller must use `send` and `recv`: a frame waits to be read or
        written, or the connection has ended and they raise the reason.
        """
        if self._has_unread or self.paused or self.protocol.state is not State.OPEN:
            return False
        self._on_reply = on_reply
        self.protocol.send_text(message)
        try:
            self.send_data()
        except (OSError, RuntimeError):  # the event loop decides which of the two
            self.transport.abort()
        return True

    def process_event(self, event: Event) -> None:
        """Pass a reply to its callback, or leave the frame to `recv`."""
        if not isinstance(event, Frame) or event.opcode not in DATA_OPCODES:
            super().process_event(event)
            return
        on_reply, self._on_reply = self._on_reply, None
        reply = None if on_reply is None else _complete_text(event)
        if reply is None:
            self._has_unread = True
            super().process_event(event)
        if on_reply is not None:
            on_reply(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the caller that waits for a reply."""
        super().connection_lost(exc)
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is not None:
            on_reply(None)


def _complete_text(frame: Frame) -> str | None:
    """Return the text of a frame that is a complete message, or None if `recv` must handle it."""
    if not frame.fin or frame.opcode is not Opcode.TEXT:
        return None
    try:
        return str(frame.data, "utf-8")
    except UnicodeDecodeError:
        return None
