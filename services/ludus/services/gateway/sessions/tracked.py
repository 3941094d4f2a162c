"""The sessions that were opened through this gateway: whose they are, and until when.

    opened --add--> tracked --touch at each call--> ... --forget--> quota and events are told
                         |  the last connection that called it lets go of it
                         +--disown--> lingers; the next call attaches it to its caller

Routing needs none of this. The sweep forgets sessions that their servers ended without a
word, because nobody called them any more, so that quotas do not fill up with the dead. And
it keeps sessions whose clients are there but silent from ending after the link to their
server broke: for the server they linger, and each `detach` lets the linger begin again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ludus.env.sessions.interface import Connection, SessionEvents
from ludus.env.sessions.tombstones import SessionEnd, SessionTombstone
from ludus.services.gateway.fleet.server_link import ServerLink
from ludus.services.gateway.tenancy.quotas import Quotas
from ludus.services.gateway.tenancy.tenants import Tenant

_log = logging.getLogger(__name__)

_MIN_SWEEP_S = 0.1
_MAX_SWEEP_S = 5.0
_UNCALLED = SessionTombstone(SessionEnd.IDLE, "nobody called it any more")


@dataclass(slots=True, eq=False)
class TrackedSession:
    """A session that was opened through this gateway."""

    link: ServerLink
    server_id: str
    """Who answered there when it was opened."""
    tenant: Tenant
    close_when_done: bool
    linger_s: float
    used_s: float
    """Event loop time of its last call."""
    detached_s: float = 0.0
    """When its last connection ended; a later call makes that good again."""
    num_running: int = 0
    """Calls under way: while there is one it is in use, however long that takes."""


class TrackedSessions:
    """Sessions by id, as far as this gateway knows of them.

    Args:
        linger_s: how long sessions outlive a broken link; sets the pace of the sweep.
        idle_timeout_s: without a call for so long a session is forgotten whose server does not
            say when it ends those that are idle.
        on_lost: told how many went with their server, though nobody called them since.
    """

    def __init__(
        self,
        quotas: Quotas,
        events: SessionEvents,
        linger_s: float,
        idle_timeout_s: float,
        on_lost: Callable[[int], None],
    ) -> None:
        self._quotas = quotas
        self._events = events
        self._idle_timeout_s = idle_timeout_s
        self._on_lost = on_lost
        self._sweep_each_s = min(max(linger_s / 3, _MIN_SWEEP_S), _MAX_SWEEP_S)
        self._by_id: dict[str, TrackedSession] = {}
        self._connections: dict[str, set[Connection]] = {}
        """Those that a session goes with, also one that was opened elsewhere."""
        self._loop = asyncio.get_running_loop()
        self._sweeping = self._loop.create_task(self._sweep_forever())

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, session_id: str) -> TrackedSession | None:
        """What is known of a session; None of one that was opened elsewhere or is gone."""
        return self._by_id.get(session_id)

    def add(self, session_id: str, tracked: TrackedSession, connection: Connection | None) -> None:
        """Track a new session."""
        self._by_id[session_id] = tracked
        if connection is not None:
            self._join(session_id, connection)

    def attach(self, session_id: str, connection: Connection) -> None:
        """Note a call; a session that lingers goes with the caller's connection now, too."""
        tracked = self.touch(session_id)
        if session_id not in connection.session_ids and (tracked is None or tracked.linger_s > 0):
            self._join(session_id, connection)

    def touch(self, session_id: str) -> TrackedSession | None:
        """Note a call, and give what is known of the session."""
        tracked = self._by_id.get(session_id)
        if tracked is not None:
            tracked.used_s, tracked.detached_s = self._loop.time(), 0.0
        return tracked

    def begin(self, session_id: str) -> None:
        """Note that a call is under way; `end` follows."""
        tracked = self.touch(session_id)
        if tracked is not None:
            tracked.num_running += 1

    def end(self, session_id: str) -> None:
        """Note that a call is answered, or given up."""
        tracked = self._by_id.get(session_id)
        if tracked is not None:
            tracked.num_running = max(tracked.num_running - 1, 0)
            tracked.used_s = self._loop.time()

    def let_go(self, session_id: str, connection: Connection | None) -> bool:
        """Take a session from a connection; True when it goes with no other."""
        connections = self._connections.get(session_id, set())
        if connection is not None:
            connections.discard(connection)
            connection.session_ids.discard(session_id)
        if not connections:
            self._connections.pop(session_id, None)
        return not connections

    def disown(self, session_id: str) -> None:
        """Note that the last of the session's connections has ended."""
        tracked = self._by_id.get(session_id)
        if tracked is not None:
            tracked.detached_s = self._loop.time()

    def forget(self, session_id: str, why: SessionTombstone) -> TrackedSession | None:
        """What was known of a session that has ended, None where that was nothing."""
        for connection in self._connections.pop(session_id, ()):
            connection.session_ids.discard(session_id)
        tracked = self._by_id.pop(session_id, None)
        if tracked is None:
            return None
        self._quotas.closed(tracked.tenant, 1)
        self._events.ended(session_id, why)
        return tracked

    def close(self) -> None:
        """End the sweep."""
        self._sweeping.cancel()

    def _join(self, session_id: str, connection: Connection) -> None:
        connection.session_ids.add(session_id)
        self._connections.setdefault(session_id, set()).add(connection)

    async def _sweep_forever(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(self._sweep_each_s)
            now_s = self._loop.time()
            self._forget_lost()
            for session_id, tracked in list(self._by_id.items()):
                if not tracked.num_running and self._is_over(tracked, now_s):
                    self.forget(session_id, _UNCALLED)
                elif not tracked.detached_s and tracked.used_s < tracked.link.connected_s:
                    tracked.link.send_detach(session_id)

    def _forget_lost(self) -> None:
        """Forget the sessions of servers that are gone for good, and tell how many those were."""
        lost: Counter[str] = Counter()
        for session_id, tracked in list(self._by_id.items()):
            reason = tracked.link.reason_lost(tracked.server_id, tracked.linger_s)
            if reason:
                lost[reason] += 1
                self.forget(session_id, SessionTombstone(SessionEnd.LOST, reason))
                tracked.link.closed(1)
        for reason, num in lost.items():
            _log.warning("%d sessions lost: %s", num, reason)
            self._on_lost(num)

    def _is_over(self, tracked: TrackedSession, now_s: float) -> bool:
        """True when the server has ended the session, because nobody called it any more."""
        if tracked.detached_s and tracked.detached_s + tracked.linger_s < now_s:
            return True
        description = tracked.link.description
        told_s = description.idle_timeout_s if description is not None else 0.0
        return tracked.used_s + (told_s or self._idle_timeout_s) < now_s
