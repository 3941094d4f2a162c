"""Sessions that were opened through this gateway, with their tenants and connections.

    opened --add--> tracked --touch at each call--> ... --remove--> quotas and events are updated
                         |
                         |  the last connection that called it ends
                         +--mark_detached--> lingers; the next call attaches it to its caller

Routing does not need this data. A server ends idle sessions without notice, so a regular sweep
removes sessions whose idle timeout has passed; otherwise they would use up quotas. When the link to
a server breaks, the server starts the linger time of its sessions. After the link is restored, the
sweep sends a `detach` for each session whose client is silent, which restarts its linger time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ludus.env.sessions.interface import Connection, SessionEvents
from ludus.env.sessions.tombstones import SessionEnd, SessionTombstone
from ludus.services.gateway.fleet.server_link import ServerLink
from ludus.services.gateway.tenancy.quotas import Quotas
from ludus.services.gateway.tenancy.tenants import Tenant

_log = logging.getLogger(__name__)

_MIN_SWEEP_INTERVAL_S = 0.1
MAX_SWEEP_INTERVAL_S = 5.0
_IDLE_TOMBSTONE = SessionTombstone(SessionEnd.IDLE, "it was idle")


@dataclass(slots=True, eq=False)
class TrackedSession:
    """A session that was opened through this gateway."""

    link: ServerLink
    server_id: str
    """Id that the server had when the session was opened."""
    tenant: Tenant
    closes_when_done: bool
    linger_s: float
    last_used_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """Event-loop time of the last call, or of the open."""
    detached_s: float = 0.0
    """Event-loop time at which the last connection ended; 0 while a connection uses it."""
    num_running_calls: int = 0
    """Number of running calls; a session with running calls is not idle."""


class TrackedSessions:
    """The sessions that were opened through this gateway, by id.

    Args:
        linger_s: seconds that sessions survive a broken link. The sweep runs about three times in
            this period.
        idle_timeout_s: seconds without a call after which a session is removed. Applies only if
            its server does not report an idle timeout.
        on_lost: called with the number of sessions that were lost with their server.
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
        self._sessions: dict[str, TrackedSession] = {}
        self._connections: dict[str, set[Connection]] = {}
        """Connections that use each session, including sessions opened through other gateways."""
        self._loop = asyncio.get_running_loop()
        self._sweep_task = self._loop.create_task(self._sweep_forever())

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[TrackedSession]:
        return iter(self._sessions.values())

    @property
    def num_connected_sessions(self) -> int:
        """Number of sessions that a connection uses, including sessions of other gateways."""
        return len(self._connections)

    def get(self, session_id: str) -> TrackedSession | None:
        """Return a session, or None if it is gone or another gateway opened it."""
        return self._sessions.get(session_id)

    def add(self, session_id: str, session: TrackedSession, connection: Connection | None) -> None:
        """Track a new session."""
        self._sessions[session_id] = session
        if connection is not None:
            self._add_connection(session_id, connection)

    def attach(self, session_id: str, connection: Connection) -> None:
        """Record a call, and attach a session that can linger to the caller's connection."""
        session = self.touch(session_id)
        if session_id not in connection.session_ids and (session is None or session.linger_s > 0):
            self._add_connection(session_id, connection)

    def touch(self, session_id: str) -> TrackedSession | None:
        """Record a call, and return the session if it is tracked."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.last_used_s, session.detached_s = self._loop.time(), 0.0
        return session

    def begin_call(self, session_id: str) -> None:
        """Record the start of a call; `end_call` must follow."""
        session = self.touch(session_id)
        if session is not None:
            session.num_running_calls += 1

    def end_call(self, session_id: str) -> None:
        """Record the end of a call, successful or not."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.num_running_calls = max(session.num_running_calls - 1, 0)
            session.last_used_s = self._loop.time()

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
        session = self._sessions.get(session_id)
        if session is not None:
            session.detached_s = self._loop.time()

    def remove(self, session_id: str, tombstone: SessionTombstone) -> TrackedSession | None:
        """Remove and return a session that has ended; None if it was not tracked."""
        for connection in self._connections.pop(session_id, ()):
            connection.session_ids.discard(session_id)
        session = self._sessions.pop(session_id, None)
        if session is None:
            return None
        self._quotas.release(session.tenant, 1)
        self._events.notify_end(session_id, tombstone)
        return session

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
            self._remove_lost_sessions()
            for session_id, session in list(self._sessions.items()):
                if not session.num_running_calls and self._has_expired(session, now_s):
                    self.remove(session_id, _IDLE_TOMBSTONE)
                elif not session.detached_s and session.last_used_s < session.link.connected_at_s:
                    session.link.send_detach(session_id)

    def _remove_lost_sessions(self) -> None:
        """Remove the sessions that were lost with their servers, and report their number."""
        num_lost_by_reason: Counter[str] = Counter()
        for session_id, session in list(self._sessions.items()):
            reason = session.link.explain_loss(session.server_id, session.linger_s)
            if reason:
                num_lost_by_reason[reason] += 1
                self.remove(session_id, SessionTombstone(SessionEnd.LOST, reason))
                session.link.count_ended(1)
        for reason, num_lost in num_lost_by_reason.items():
            _log.warning("lost %d sessions: %s", num_lost, reason)
            self._on_lost(num_lost)

    def _has_expired(self, session: TrackedSession, now_s: float) -> bool:
        """Return whether the linger time or the idle timeout of the session has passed."""
        if session.detached_s and session.detached_s + session.linger_s < now_s:
            return True
        description = session.link.description
        server_timeout_s = description.idle_timeout_s if description is not None else 0.0
        return session.last_used_s + (server_timeout_s or self._idle_timeout_s) < now_s
