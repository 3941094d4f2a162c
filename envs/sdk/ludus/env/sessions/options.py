"""Options of a server's sessions."""

from __future__ import annotations

from dataclasses import dataclass, field

from ludus.env.security.session_ids import SessionKey, new_server_id


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """Limits and identity of a server's sessions."""

    max_sessions: int = 256
    idle_timeout_s: float = 600.0
    """Time without a call after which a session is closed."""
    step_timeout_s: float = 0.0
    """Maximum time of a reset or step; a longer call closes its session. 0 sets no limit."""
    wait_for_slot_s: float = 0.0
    """Maximum time that an open waits for a free session."""
    max_waiting: int = 1024
    """Maximum number of opens that wait; more are refused."""
    first_seed: int | None = None
    """Seed of the first reset without a seed; each later reset adds 1. None sets no seed."""
    is_deterministic: bool = False
    """True if `check_environment` found the environment deterministic."""
    server_id: str = field(default_factory=new_server_id)
    key: SessionKey | None = None
    """Key of session ids that a gateway signs; None refuses such ids."""
