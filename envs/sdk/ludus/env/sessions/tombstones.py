"""What is remembered of sessions that are gone: why, and their last answer, for repeats."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ludus.env.encoding import EncodedResult
from ludus.proto.errors import SessionLostError

MAX_REMEMBERED_SESSIONS = 1024


@dataclass(frozen=True, slots=True)
class _Departed:
    reason: str
    last: EncodedResult | None


class Tombstones:
    """The last sessions of a server, by id; older ones are forgotten."""

    def __init__(self) -> None:
        self._departed: OrderedDict[str, _Departed] = OrderedDict()

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._departed

    def __len__(self) -> int:
        return len(self._departed)

    def remember(self, session_id: str, reason: str, last: EncodedResult | None) -> None:
        """Notes why a session ended; what was noted first holds."""
        self._departed.setdefault(session_id, _Departed(reason, last))
        if len(self._departed) > MAX_REMEMBERED_SESSIONS:
            self._departed.popitem(last=False)

    def reason(self, session_id: str) -> str | None:
        """Why it ended; None where that is unknown."""
        departed = self._departed.get(session_id)
        return None if departed is None else departed.reason

    def lost(self, session_id: str) -> SessionLostError:
        """What a call to it is answered with."""
        reason = self.reason(session_id) or "this server does not know it (it may have restarted)"
        return SessionLostError(f"session {session_id!r} is gone: {reason}; open a new one")

    def recall(self, session_id: str, step_index: int) -> EncodedResult:
        """Its last answer, where the step that is asked for is that one.

        Raises:
            SessionLostError: it is another, or nothing is known.
        """
        departed = self._departed.get(session_id)
        last = None if departed is None else departed.last
        if last is not None and 0 < step_index == last.step_index:
            return last
        raise self.lost(session_id)
