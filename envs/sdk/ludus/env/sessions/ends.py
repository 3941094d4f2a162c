"""Why sessions end, as closed sets: for metrics, and for the close codes of sockets."""

from __future__ import annotations

import re
from enum import StrEnum


class SessionEnd(StrEnum):
    """Classes of reasons."""

    CLOSED = "closed"
    CONNECTION_ENDED = "connection_ended"
    EPISODE_ENDED = "episode_ended"
    IDLE = "idle"
    TIMEOUT = "timeout"
    SHUTDOWN = "shutdown"
    LOST = "lost"


# Another session of its worker may have hung instead: then the worker was killed.
_OWN_TIMEOUT = re.compile(r"an? \w+ took longer than ")
_CLASS_OF_BEGINNING = {
    "it was closed": SessionEnd.CLOSED,
    "the connection that opened it ended": SessionEnd.CONNECTION_ENDED,
    "its episode ended": SessionEnd.EPISODE_ENDED,
    "it was idle": SessionEnd.IDLE,
    "the server is shutting down": SessionEnd.SHUTDOWN,
}


def end_of(reason: str) -> SessionEnd:
    """The class of a reason that `SessionEvents` tell; what nobody planned is LOST."""
    for beginning, end in _CLASS_OF_BEGINNING.items():
        if reason.startswith(beginning):
            return end
    return SessionEnd.TIMEOUT if _OWN_TIMEOUT.match(reason) else SessionEnd.LOST


_CLOSE_CODES = {
    SessionEnd.CLOSED: 1000,
    SessionEnd.EPISODE_ENDED: 1000,
    SessionEnd.LOST: 1011,
    SessionEnd.TIMEOUT: 1011,
}
_MAX_REASON_BYTES = 123  # what fits into a close frame


def close_code(reason: str) -> int:
    """The WebSocket close code for a session's end: 1000 wanted, 1001 unneeded, 1011 lost."""
    return _CLOSE_CODES.get(end_of(reason), 1001)


def close_text(reason: str) -> str:
    """The reason as far as a close frame holds it."""
    return reason.encode(errors="replace")[:_MAX_REASON_BYTES].decode(errors="ignore")
