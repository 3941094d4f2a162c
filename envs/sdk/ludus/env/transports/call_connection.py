"""A client's WebSocket whose replies need no task, no lock and no queue.

    ask --> frame --> socket          socket --> parser --> frame --+--> on_reply
                                                                    |
                                              fragments, no reply --+--> send and recv

The short way is taken only while nothing waits to be read, so a frame that nobody asked for is
never taken for a reply. It uses names of websockets that may change with a version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.frames import DATA_OPCODES, Frame, Opcode
from websockets.protocol import Event, State

OnReply = Callable[[str | None], Any]
"""Takes a reply, once; None says that `recv` has it, or says why there is none. Must not raise."""


class CallConnection(ClientConnection):
    """One connection, on which each message gets one reply before the next one is sent."""

    _on_reply: OnReply | None = None
    _has_unread = False
    """True from the first frame on that `recv` has to read."""

    def ask(self, message: bytes, on_reply: OnReply) -> bool:
        """True when the text is on its way and its reply will be handed on.

        False leaves it to `send` and `recv`: something waits to be read or to be written, or the
        connection has ended and they say why.
        """
        if self._has_unread or self.paused or self.protocol.state is not State.OPEN:
            return False
        self._on_reply = on_reply
        self.protocol.send_text(message)
        try:
            self.send_data()
        except (OSError, RuntimeError):  # which of them depends on the event loop
            self.transport.abort()
        return True

    def process_event(self, event: Event) -> None:
        """Hand a reply on, or leave it to `recv`."""
        if not isinstance(event, Frame) or event.opcode not in DATA_OPCODES:
            super().process_event(event)
            return
        on_reply, self._on_reply = self._on_reply, None
        reply = None if on_reply is None else _whole_text(event)
        if reply is None:
            self._has_unread = True
            super().process_event(event)
        if on_reply is not None:
            on_reply(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits for a reply."""
        super().connection_lost(exc)
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is not None:
            on_reply(None)


def _whole_text(frame: Frame) -> str | None:
    """The text of a frame that is a whole message; None where `recv` should look at it."""
    if not frame.fin or frame.opcode is not Opcode.TEXT:
        return None
    try:
        return str(frame.data, "utf-8")
    except UnicodeDecodeError:
        return None
