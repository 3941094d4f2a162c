"""Records of injected faults and of lost sessions, and the check that faults explain all losses.

A session may be lost only if a fault affected it between its last successful call and its failure.
Any other loss is a violation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SLACK_S = 3.0
"""Maximum clock difference of two processes that record the same event, in seconds."""


@dataclass(frozen=True, slots=True)
class Location:
    """The server and route of a session. In a fault, an empty field matches any value."""

    server: str = ""
    worker: int = 0
    gateway: str = ""
    """Gateway whose death ends the session; "" if no gateway's death does."""
    client: str = ""
    tenant: str = ""
    wire: str = ""

    def matches(self, other: Location) -> bool:
        """Return whether every field that is set here equals the field of the other location."""
        pairs = (
            (self.server, other.server),
            (self.worker, other.worker),
            (self.gateway, other.gateway),
            (self.client, other.client),
            (self.tenant, other.tenant),
            (self.wire, other.wire),
        )
        return all(
            not expected_part or expected_part == actual_part
            for expected_part, actual_part in pairs
        )


@dataclass(slots=True)
class Fault:
    """An injected fault."""

    number: int
    kind: str
    target: str
    started_s: float
    finished_s: float = float("inf")
    affected_locations: tuple[Location, ...] = ()
    """Locations whose sessions may end; empty if no session may end."""
    outcome: str = ""

    def explains(self, session: LostSession) -> bool:
        """Return whether the fault explains the loss of the session."""
        overlaps = (
            self.started_s - SLACK_S <= session.failed_s
            and session.last_success_s - SLACK_S <= self.finished_s
        )
        return overlaps and any(
            location.matches(session.location) for location in self.affected_locations
        )


@dataclass(frozen=True, slots=True)
class LostSession:
    """A session that was lost, as reported by its client."""

    player: str
    location: Location
    last_success_s: float
    """Time of the last successful call."""
    failed_s: float
    code: str
    message: str


@dataclass(slots=True)
class FaultRecord:
    """All recorded faults and losses."""

    faults: list[Fault] = field(default_factory=list)
    lost: list[LostSession] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Counts reported by the clients."""

    def find_unexplained_losses(self) -> list[LostSession]:
        """Return the lost sessions that no fault explains."""
        return [
            loss for loss in self.lost if not any(fault.explains(loss) for fault in self.faults)
        ]

    def count_losses_by_fault(self) -> Counter[str]:
        """Count lost sessions by the kind of the latest fault that explains them."""
        num_by_kind: Counter[str] = Counter()
        for session in self.lost:
            explaining_faults = [fault for fault in self.faults if fault.explains(session)]
            num_by_kind[explaining_faults[-1].kind if explaining_faults else "none"] += 1
        return num_by_kind
