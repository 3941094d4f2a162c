"""Sessions that were opened through this gateway, with their tenants and connections.

    opened --add--> tracked --touch at each call--> ... --remove--> quotas and events are updated
                         |
                         |  the last connection that called it ends
                         +--mark_detached--> lingers; the next call attaches it to its caller

Routing does not need this data. The sweep removes sessions that their servers ended silently
after their idle timeout, so that ended sessions do not use up quotas. It also keeps sessions of
silent clients alive after the link to their server broke: the server lets such sessions linger,
and each `detach` restarts the linger time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ludus.env.sessions.interface import Connection, SessionEvents
from ludus.env.sessions.tombstones import SessionEnd, SessionTombstone
from ludus.services.gateway.fleet.server_link import ServerLink
from ludus.services.gateway.tenancy.quotas import Quotas
from ludus.services.gateway.tenancy.tenants import Tenant

_log = logging.getLogger(__name__)

_MIN_SWEEP_INTERVAL_S = 0.1
MAX_SWEEP_INTERVAL_S = 5.0
_IDLE = SessionTombstone(SessionEnd.IDLE, "it was idle")


@dataclass(slots=True, eq=False)
class TrackedSession:
    """A session that was opened through this gateway."""

    link: ServerLink
    server_id: str
    """Id of the server when the session was opened."""
    tenant: Tenant
    close_when_done: bool
    linger_s: float
    last_used_s: float
    """Event-loop time of the last call."""
    detached_s: float = 0.0
    """Event-loop time at which the last connection ended; 0 while a connection uses it."""
    num_running: int = 0
    """Number of running calls; a session with running calls is in use."""


class TrackedSessions:
    """Sessions by id that were opened through this gateway.

    Args:
        linger_s: seconds that sessions survive a broken link; a third of it is the interval of
            the sweep.
        idle_timeout_s: seconds without a call after which a session is removed, if its server
            does not report an idle timeout.
        on_lost: called with the number of sessions that the sweep found lost with their server.
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
        self.sweep_interval_s = min(max(linger_s / 3, _MIN_SWEEP_INTERVAL_S), MAX_SWEEP_INTERVAL_S)
        self._by_id: dict[str, TrackedSession] = {}
        self._connections: dict[str, set[Connection]] = {}
        """Connections that use each session, including sessions opened through other gateways."""
        self._loop = asyncio.get_running_loop()
        self._sweep_task = self._loop.create_task(self._sweep_forever())

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[TrackedSession]:
        return iter(self._by_id.values())

    @property
    def num_connected_sessions(self) -> int:
        """Number of sessions that a connection uses, including sessions of other gateways."""
        return len(self._connections)

    def get(self, session_id: str) -> TrackedSession | None:
        """Return a session, or None if it is gone or another gateway opened it."""
        return self._by_id.get(session_id)

    def add(self, session_id: str, tracked: TrackedSession, connection: Connection | None) -> None:
        """Track a new session."""
        self._by_id[session_id] = tracked
        if connection is not None:
            self._add_connection(session_id, connection)

    def attach(self, session_id: str, connection: Connection) -> None:
        """Record a call; a session that can linger is attached to the caller's connection."""
        tracked = self.touch(session_id)
        if session_id not in connection.session_ids and (tracked is None or tracked.linger_s > 0):
            self._add_connection(session_id, connection)

    def touch(self, session_id: str) -> TrackedSession | None:
        """Record a call, and return the session if it is tracked."""
        tracked = self._by_id.get(session_id)
        if tracked is not None:
            tracked.last_used_s, tracked.detached_s = self._loop.time(), 0.0
        return tracked

    def begin_call(self, session_id: str) -> None:
        """Record the start of a call; `end_call` must follow."""
        tracked = self.touch(session_id)
        if tracked is not None:
            tracked.num_running += 1

    def end_call(self, session_id: str) -> None:
        """Record the end of a call, successful or not."""
        tracked = self._by_id.get(session_id)
        if tracked is not None:
            tracked.num_running = max(tracked.num_running - 1, 0)
            tracked.last_used_s = self._loop.time()

    def remove_connection(self, session_id: str, connection: Connection | None) -> bool:
        """Detach a session from a connection; return True if no other connection uses it."""
        connections = self._connections.get(session_id, set())
        if connection is not None:
            connections.discard(connection)
            connection.session_ids.discard(session_id)
        if not connections:
            self._connections.pop(session_id, None)
        return not connections

    def mark_detached(self, session_id: str) -> None:
        """Record that the session's last connection has ended."""
        tracked = self._by_id.get(session_id)
        if tracked is not None:
            tracked.detached_s = self._loop.time()

    def remove(self, session_id: str, tombstone: SessionTombstone) -> TrackedSession | None:
        """Remove and return a session that has ended; None if it was not tracked."""
        for connection in self._connections.pop(session_id, ()):
            connection.session_ids.discard(session_id)
        tracked = self._by_id.pop(session_id, None)
        if tracked is None:
            return None
        self._quotas.release(tracked.tenant, 1)
        self._events.notify_end(session_id, tombstone)
        return tracked

    def close(self) -> None:
        """Stop the sweep."""
        self._sweep_task.cancel()

    def _add_connection(self, session_id: str, connection: Connection) -> None:
        connection.session_ids.add(session_id)
        self._connections.setdefault(session_id, set()).add(connection)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self.sweep_interval_s)
            now_s = self._loop.time()
            self._remove_lost()
            for session_id, tracked in list(self._by_id.items()):
                if not tracked.num_running and self._has_expired(tracked, now_s):
                    self.remove(session_id, _IDLE)
                elif not tracked.detached_s and tracked.last_used_s < tracked.link.connected_s:
                    tracked.link.send_detach(session_id)

    def _remove_lost(self) -> None:
        """Remove the sessions of lost servers, and report their number."""
        num_lost: Counter[str] = Counter()
        for session_id, tracked in list(self._by_id.items()):
            reason = tracked.link.explain_loss(tracked.server_id, tracked.linger_s)
            if reason:
                num_lost[reason] += 1
                self.remove(session_id, SessionTombstone(SessionEnd.LOST, reason))
                tracked.link.count_ended(1)
        for reason, num in num_lost.items():
            _log.warning("lost %d sessions: %s", num, reason)
            self._on_lost(num)

    def _has_expired(self, tracked: TrackedSession, now_s: float) -> bool:
        """Return whether the server has ended the session because it was not called."""
        if tracked.detached_s and tracked.detached_s + tracked.linger_s < now_s:
            return True
        description = tracked.link.description
        server_timeout_s = description.idle_timeout_s if description is not None else 0.0
        return tracked.last_used_s + (server_timeout_s or self._idle_timeout_s) < now_s
