"""The sessions that were opened through this gateway: whose they are, and until when.

    opened --add--> held --touch at each call--> ... --forget--> quota and events are told
                      |  its connection ends
                      +--disown--> lingers; the next call makes it its caller's

Routing needs none of this. The sweep forgets sessions that their servers ended without a
word, because nobody called them any more, so that quotas do not fill up with the dead. And
it keeps sessions whose clients are there but silent from ending after the link to their
server broke: for the server they linger, and each `detach` lets the linger begin again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ludus.env.sessions.interface import Owner, SessionEvents
from ludus.services.gateway.fleet.server_link import ServerLink
from ludus.services.gateway.tenancy.quotas import Quotas
from ludus.services.gateway.tenancy.tenants import Tenant

_MIN_SWEEP_S = 0.1
_MAX_SWEEP_S = 5.0


@dataclass(slots=True, eq=False)
class TrackedSession:
    """A session that was opened through this gateway."""

    link: ServerLink
    tenant: Tenant
    owner: Owner | None
    close_when_done: bool
    linger_s: float
    used_s: float
    """Event loop time of its last call."""
    detached_s: float = 0.0
    """When its connection ended; a later call makes that good again."""


class TrackedSessions:
    """Sessions by id, as far as this gateway knows of them.

    Args:
        idle_timeout_s: a session without a call for so long counts as ended.
        linger_s: how long sessions outlive a broken link; sets the pace of the sweep.
    """

    def __init__(
        self, quotas: Quotas, events: SessionEvents, idle_timeout_s: float, linger_s: float
    ) -> None:
        self._quotas = quotas
        self._events = events
        self._idle_timeout_s = idle_timeout_s
        self._sweep_each_s = min(max(linger_s / 3, _MIN_SWEEP_S), _MAX_SWEEP_S)
        self._held: dict[str, TrackedSession] = {}
        self._loop = asyncio.get_running_loop()
        self._sweeping = self._loop.create_task(self._sweep_forever())

    def __len__(self) -> int:
        return len(self._held)

    def get(self, session_id: str) -> TrackedSession | None:
        """What is known of a session; None of one that was opened elsewhere or is gone."""
        return self._held.get(session_id)

    def add(self, session_id: str, held: TrackedSession) -> None:
        """Holds a new session."""
        self._held[session_id] = held
        if held.owner is not None:
            held.owner.session_ids.add(session_id)

    def touch(self, session_id: str, owner: Owner | None) -> None:
        """Notes a call; a session whose own connection ended belongs to the caller's now."""
        held = self._held.get(session_id)
        if held is None:
            if owner is not None:
                owner.session_ids.add(session_id)
            return
        held.used_s = self._loop.time()
        held.detached_s = 0.0
        if held.owner is None and owner is not None:
            held.owner = owner
            owner.session_ids.add(session_id)

    def touch_all(self, session_ids: list[str]) -> None:
        """Notes calls that came outside any stream."""
        get, now_s = self._held.get, self._loop.time()
        for session_id in session_ids:
            held = get(session_id)
            if held is not None:
                held.used_s, held.detached_s = now_s, 0.0

    def disown(self, session_id: str) -> None:
        """Notes that the session's connection has ended."""
        held = self._held.get(session_id)
        if held is None:
            return
        held.detached_s = self._loop.time()
        if held.owner is not None:
            held.owner.session_ids.discard(session_id)
            held.owner = None

    def forget(self, session_id: str, reason: str) -> TrackedSession | None:
        """What was known of a session that has ended, None where that was nothing."""
        held = self._held.pop(session_id, None)
        if held is None:
            return None
        self._quotas.closed(held.tenant, 1)
        if held.owner is not None:
            held.owner.session_ids.discard(session_id)
        self._events.ended(session_id, reason)
        return held

    def close(self) -> None:
        """Ends the sweep."""
        self._sweeping.cancel()

    async def _sweep_forever(self) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(self._sweep_each_s)
            now_s = self._loop.time()
            for session_id, held in list(self._held.items()):
                lingered = held.detached_s and held.detached_s + held.linger_s < now_s
                if lingered or held.used_s + self._idle_timeout_s < now_s:
                    self.forget(session_id, "nobody called it any more")
                elif not held.detached_s and held.used_s < held.link.connected_s:
                    held.link.send_detach(session_id)
