"""Limits of the sessions of a server."""

from __future__ import annotations

from dataclasses import dataclass, field

from ludus.env.security.session_ids import SessionKey, new_server_id


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """Limits of the sessions of a server."""

    max_sessions: int = 256
    idle_timeout_s: float = 600.0
    """A session without a call for so long is ended."""
    step_timeout_s: float = 0.0
    """A reset or step that takes longer ends its session; 0 waits for ever."""
    wait_for_slot_s: float = 0.0
    """How long an open waits for a free session."""
    max_waiting: int = 1024
    """Opens that may wait at once; more are refused."""
    first_seed: int | None = None
    """Resets without a seed take this one, then the next; None leaves it to the environment."""
    is_deterministic: bool = False
    """What check_environment has shown."""
    server_id: str = field(default_factory=new_server_id)
    key: SessionKey | None = None
    """Lets clients open sessions under ids that a gateway with the same key signed."""
