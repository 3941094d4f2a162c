"""Which sessions have a socket: at most one each, told when its session ends.

session ends --SessionEvents--> Attachments --> the socket closes and says why
"""

from __future__ import annotations

from typing import Protocol

from ludus.env.sessions.interface import SessionEvents, Sessions


class Attached(Protocol):
    """A socket that serves a session."""

    def session_ended(self, reason: str) -> None:
        """Closes the socket."""
        ...


class Attachments:
    """The sockets of one application, by session."""

    def __init__(self, sessions: Sessions) -> None:
        self._sockets: dict[str, Attached] = {}
        self._closing: set[str] = set()
        events: SessionEvents | None = getattr(sessions, "events", None)
        if events is not None:
            events.on_end.append(self._on_end)

    def attach(self, session_id: str, socket: Attached) -> bool:
        """True when the session had no socket; it has this one now."""
        return self._sockets.setdefault(session_id, socket) is socket

    def detach(self, session_id: str) -> bool:
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

    def _on_end(self, session_id: str, reason: str) -> None:
        socket = self._sockets.get(session_id)
        if socket is not None:
            socket.session_ended(reason)
