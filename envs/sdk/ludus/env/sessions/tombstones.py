"""Why sessions ended, and what is remembered of those that are gone: their last answer."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from ludus.env.encoding import EncodedResult
from ludus.proto.errors import SessionLostError

MAX_REMEMBERED_SESSIONS = 1024
MAX_REMEMBERED_BYTES = 64 * 1024 * 1024
"""Of their last answers; beyond it the oldest are dropped, and why their sessions ended is kept."""


class SessionEnd(StrEnum):
    """How a session can end; a closed set, for metrics and for the close codes of sockets."""

    CLOSED = "closed"
    CONNECTION_ENDED = "connection_ended"
    EPISODE_ENDED = "episode_ended"
    IDLE = "idle"
    TIMEOUT = "timeout"
    """A call of its own took too long; where another session's did, it is LOST."""
    SHUTDOWN = "shutdown"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class SessionTombstone:
    """Why a session ended: the kind for programs, the reason for people."""

    kind: SessionEnd
    reason: str
    """A clause that follows "the session is gone:"."""


class Tombstones:
    """The last sessions of a server, by id; older ones are forgotten."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, SessionTombstone] = OrderedDict()
        self._answers: OrderedDict[str, EncodedResult] = OrderedDict()
        self._num_bytes = 0
        """Of the answers."""

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._ended

    def __len__(self) -> int:
        return len(self._ended)

    def remember(
        self, session_id: str, ended: SessionTombstone, last: EncodedResult | None
    ) -> None:
        """Note why a session ended; what was noted first holds."""
        if session_id in self._ended:
            return
        self._ended[session_id] = ended
        if last is not None:
            self._answers[session_id] = last
            self._num_bytes += last.num_bytes
        while self._num_bytes > MAX_REMEMBERED_BYTES:
            self._num_bytes -= self._answers.popitem(last=False)[1].num_bytes
        if len(self._ended) > MAX_REMEMBERED_SESSIONS:
            self._forget_oldest()

    def ended(self, session_id: str) -> SessionTombstone | None:
        """Why it ended; None where that is unknown."""
        return self._ended.get(session_id)

    def lost(self, session_id: str) -> SessionLostError:
        """What a call to it is answered with."""
        ended = self.ended(session_id)
        reason = ended.reason if ended else "this server does not know it (it may have restarted)"
        return SessionLostError(f"session {session_id!r} is gone: {reason}; open a new one")

    def recall(self, session_id: str, step_index: int) -> EncodedResult:
        """Its last answer, where the step that is asked for is that one.

        Raises:
            SessionLostError: it is another, or nothing is known.
        """
        last = self._answers.get(session_id)
        if last is not None and 0 < step_index == last.step_index:
            return last
        raise self.lost(session_id)

    def _forget_oldest(self) -> None:
        session_id, _ = self._ended.popitem(last=False)
        last = self._answers.pop(session_id, None)
        if last is not None:
            self._num_bytes -= last.num_bytes
