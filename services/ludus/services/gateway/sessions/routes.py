"""Where the calls of a session go: read from its signed id, and remembered while it is called."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ludus.env.security.session_ids import SessionKey
from ludus.proto.errors import PermissionDeniedError, SessionLostError

_MAX_REMEMBERED = 65_536
_UNCALLED_S = 60.0
"""After twice as long without a call a route is forgotten."""


@dataclass(frozen=True, slots=True)
class Route:
    """What a session id says that was found to be genuine."""

    environment: str
    server_id: str
    tenant: str
    expires_s: int
    """Unix time."""
    session_id: str
    """What its server knows the session by."""
    is_tools_only: bool
    """The id that was given may call the session's tools and nothing else."""


class RouteCache:
    """Session ids that were verified, so that each is verified once while it is called.

    Most ids belong to sessions that have ended, and nobody tells the gateways that did not open
    them. So what was not called lately goes; should it be called again, it is verified again.

    Args:
        key: the same on every gateway and server of the fleet.
        clock: Unix time.
    """

    def __init__(self, key: SessionKey, clock: Callable[[], float] = time.time) -> None:
        self._key = key
        self._clock = clock
        self._known: dict[str, Route] = {}
        """Those that were called since the last turn."""
        self._older: dict[str, Route] = {}
        """Those that were called in the turn before it, and not since."""
        self._turned_s = clock()

    def find(self, session_id: str, tenant: str | None) -> Route:
        """The session's route, when it belongs to the tenant; None may call any.

        Raises:
            AuthenticationError: nobody with this key made the id.
            PermissionDeniedError: the session is another tenant's.
            SessionLostError: the id has expired.
        """
        route = self.read(session_id)
        if tenant is not None and route.tenant != tenant:
            raise PermissionDeniedError(
                "expected a session of the token's own tenant, got another tenant's; use the"
                " token that opened it"
            )
        return route

    def read(self, session_id: str) -> Route:
        """The route, whoever asks.

        Raises:
            AuthenticationError: nobody with this key made the id.
            SessionLostError: the id has expired.
        """
        now_s = self._clock()
        if abs(now_s - self._turned_s) >= _UNCALLED_S or len(self._known) >= _MAX_REMEMBERED:
            self._known, self._older, self._turned_s = {}, self._known, now_s
        route = self._known.get(session_id)
        if route is None:
            route = self._older.pop(session_id, None) or self._verified(session_id)
            self._known[session_id] = route
        if route.expires_s < now_s:
            raise SessionLostError("the session id has expired; open a new session")
        return route

    def _verified(self, session_id: str) -> Route:
        signed = self._key.read(session_id)
        return Route(
            signed.environment,
            signed.server_id,
            signed.tenant,
            signed.expires_s,
            signed.session_id,
            signed.is_tools_only,
        )
