"""Why sessions ended, and what is remembered of those that are gone: their last answer."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from ludus.env.encoding import EncodedResult
from ludus.proto.errors import SessionLostError

MAX_REMEMBERED_SESSIONS = 1024


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
class Ended:
    """Why a session ended: the kind for programs, the reason for people."""

    kind: SessionEnd
    reason: str
    """A clause that follows "the session is gone:"."""


@dataclass(frozen=True, slots=True)
class _Tombstone:
    ended: Ended
    last: EncodedResult | None


class Tombstones:
    """The last sessions of a server, by id; older ones are forgotten."""

    def __init__(self) -> None:
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._tombstones

    def __len__(self) -> int:
        return len(self._tombstones)

    def remember(self, session_id: str, ended: Ended, last: EncodedResult | None) -> None:
        """Note why a session ended; what was noted first holds."""
        self._tombstones.setdefault(session_id, _Tombstone(ended, last))
        if len(self._tombstones) > MAX_REMEMBERED_SESSIONS:
            self._tombstones.popitem(last=False)

    def ended(self, session_id: str) -> Ended | None:
        """Why it ended; None where that is unknown."""
        found = self._tombstones.get(session_id)
        return None if found is None else found.ended

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
        found = self._tombstones.get(session_id)
        last = None if found is None else found.last
        if last is not None and 0 < step_index == last.step_index:
            return last
        raise self.lost(session_id)
