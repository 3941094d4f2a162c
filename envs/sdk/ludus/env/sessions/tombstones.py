"""Records of sessions that have ended: the reason and the last result."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from ludus.env.encoding import EncodedResult
from ludus.proto.errors import SessionLostError

MAX_REMEMBERED_SESSIONS = 1024
MAX_REMEMBERED_BYTES = 64 * 1024 * 1024
"""Maximum size of the remembered results. Above it the oldest results are dropped."""


class SessionEnd(StrEnum):
    """Kind of a session's end, for metrics and for the close codes of sockets."""

    CLOSED = "closed"
    CONNECTION_ENDED = "connection_ended"
    EPISODE_ENDED = "episode_ended"
    IDLE = "idle"
    TIMEOUT = "timeout"
    """A call of this session took too long. Other sessions of the same worker end with LOST."""
    SHUTDOWN = "shutdown"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class SessionTombstone:
    """The reason why a session ended: a kind for programs, and a clause for people."""

    kind: SessionEnd
    reason: str
    """A clause that completes "the session is gone:"."""


class Tombstones:
    """The most recently ended sessions of a server, by id."""

    def __init__(self) -> None:
        self._tombstones: OrderedDict[str, SessionTombstone] = OrderedDict()
        self._results: OrderedDict[str, EncodedResult] = OrderedDict()
        self._num_bytes = 0
        """Size of the results."""

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._tombstones

    def __len__(self) -> int:
        return len(self._tombstones)

    def remember(
        self, session_id: str, tombstone: SessionTombstone, last_result: EncodedResult | None
    ) -> None:
        """Record why a session ended, unless a reason is already recorded."""
        if session_id in self._tombstones:
            return
        self._tombstones[session_id] = tombstone
        if last_result is not None:
            self._results[session_id] = last_result
            self._num_bytes += last_result.num_bytes
        while self._num_bytes > MAX_REMEMBERED_BYTES:
            self._num_bytes -= self._results.popitem(last=False)[1].num_bytes
        if len(self._tombstones) > MAX_REMEMBERED_SESSIONS:
            oldest_id, _ = self._tombstones.popitem(last=False)
            oldest_result = self._results.pop(oldest_id, None)
            self._num_bytes -= oldest_result.num_bytes if oldest_result is not None else 0

    def find(self, session_id: str) -> SessionTombstone | None:
        """Return the tombstone of a session, or None if there is none."""
        return self._tombstones.get(session_id)

    def make_lost_error(self, session_id: str) -> SessionLostError:
        """Build the error of a call to a session that has ended."""
        reason = "this server has no session with this id (it may have restarted)"
        if tombstone := self.find(session_id):
            reason = tombstone.reason
        return SessionLostError(f"session {session_id!r} is gone: {reason}; open a new one")

    def recall(self, session_id: str, step_index: int) -> EncodedResult:
        """Return the last result of a session if it is the result of the requested step.

        Raises:
            SessionLostError: the result of that step is not remembered.
        """
        last_result = self._results.get(session_id)
        if last_result is not None and 0 < step_index == last_result.step_index:
            return last_result
        raise self.make_lost_error(session_id)
