"""The books: faults and what they may hit, sessions and how they ended, and whether both agree.

A session may end before its time only where a fault that could reach it happened while it lived,
between the last call that was answered well and the failure. Everything else is a violation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SLACK_S = 3.0
"""Maximum clock difference of two processes that record the same event, in seconds."""


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a session and its route; in a fault, empty parts match any value."""

    server: str = ""
    worker: int = 0
    gateway: str = ""
    """Gateway whose death ends the session; "" if none does."""
    client: str = ""
    tenant: str = ""
    wire: str = ""

    def holds(self, other: Location) -> bool:
        """Return True if every part that is set here equals the other location's part."""
        pairs = (
            (self.server, other.server),
            (self.worker, other.worker),
            (self.gateway, other.gateway),
            (self.client, other.client),
            (self.tenant, other.tenant),
            (self.wire, other.wire),
        )
        return all(not own_part or own_part == other_part for own_part, other_part in pairs)


@dataclass(slots=True)
class Fault:
    """A fault that was injected."""

    number: int
    kind: str
    target: str
    begun_s: float
    ended_s: float = float("inf")
    hits: tuple[Location, ...] = ()
    """Locations whose sessions may end; empty if no session may end."""
    outcome: str = ""

    def may_end(self, session: LostSession) -> bool:
        """Return True if the fault explains the loss of the session."""
        is_then = (
            self.begun_s - SLACK_S <= session.failed_s and session.alive_s - SLACK_S <= self.ended_s
        )
        return is_then and any(location.holds(session.location) for location in self.hits)


@dataclass(frozen=True, slots=True)
class LostSession:
    """A session that ended too early, as its client saw it."""

    player: str
    location: Location
    alive_s: float
    """Time of the last successful call."""
    failed_s: float
    code: str
    message: str


@dataclass(slots=True)
class Book:
    """All recorded faults and losses."""

    faults: list[Fault] = field(default_factory=list)
    lost: list[LostSession] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of the clients."""

    def unexplained_losses(self) -> list[LostSession]:
        """Return the lost sessions that no fault explains."""
        return [loss for loss in self.lost if not any(f.may_end(loss) for f in self.faults)]

    def losses_by_fault(self) -> Counter[str]:
        """Count lost sessions by the kind of the latest fault that explains them."""
        num_by_kind: Counter[str] = Counter()
        for session in self.lost:
            able = [fault for fault in self.faults if fault.may_end(session)]
            num_by_kind[able[-1].kind if able else "none"] += 1
        return num_by_kind
