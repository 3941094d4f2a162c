"""The books: faults and what they may hit, sessions and how they ended, and whether both agree.

A session may end before its time only where a fault that could reach it happened while it lived,
between the last call that was answered well and the failure. Everything else is a violation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SLACK_S = 3.0
"""Between two processes that write down the same event."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a session is, and the way to it; in a fault, empty parts are any."""

    server: str = ""
    worker: int = 0
    gateway: str = ""
    """Empty for sessions that no gateway's death ends."""
    client: str = ""
    tenant: str = ""
    wire: str = ""

    def holds(self, other: Place) -> bool:
        """True when every part that is named here is the other's, too."""
        pairs = (
            (self.server, other.server),
            (self.worker, other.worker),
            (self.gateway, other.gateway),
            (self.client, other.client),
            (self.tenant, other.tenant),
            (self.wire, other.wire),
        )
        return all(not mine or mine == theirs for mine, theirs in pairs)


@dataclass(slots=True)
class Fault:
    """Something that was done to the plane."""

    number: int
    kind: str
    target: str
    begun_s: float
    ended_s: float = float("inf")
    hits: tuple[Place, ...] = ()
    """Sessions there may end; none where no session may."""
    outcome: str = ""

    def may_end(self, session: LostSession) -> bool:
        """True when the session was there, and lost at that time."""
        is_then = (
            self.begun_s - SLACK_S <= session.failed_s and session.alive_s - SLACK_S <= self.ended_s
        )
        return is_then and any(place.holds(session.place) for place in self.hits)


@dataclass(frozen=True, slots=True)
class LostSession:
    """A session that ended before its time, as its client saw it."""

    player: str
    place: Place
    alive_s: float
    """When the last call was made that was answered well."""
    failed_s: float
    code: str
    message: str


@dataclass(slots=True)
class Book:
    """All that was written down."""

    faults: list[Fault] = field(default_factory=list)
    lost: list[LostSession] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """What the clients counted."""

    def unexplained(self) -> list[LostSession]:
        """Lost sessions that no fault was to end."""
        return [one for one in self.lost if not any(f.may_end(one) for f in self.faults)]

    def losses_by_fault(self) -> Counter[str]:
        """Lost sessions by the kind of fault that ended them, the latest that could have."""
        found: Counter[str] = Counter()
        for session in self.lost:
            able = [fault for fault in self.faults if fault.may_end(session)]
            found[able[-1].kind if able else "none"] += 1
        return found
