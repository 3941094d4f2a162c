"""Routes of sessions, read from their signed ids and cached while they are called."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ludus.env.security.session_ids import SessionKey
from ludus.proto.errors import PermissionDeniedError, SessionLostError

_MAX_ROUTES = 65_536
_ROTATION_S = 60.0
"""Rotation interval of the cache; an unused route is removed after one to two intervals."""


@dataclass(frozen=True, slots=True)
class Route:
    """The contents of a verified session id."""

    environment: str
    server_id: str
    tenant: str
    expires_s: int
    """Unix time."""
    session_id: str
    """The session's id on its server."""
    is_tools_only: bool
    """True if the id permits only calls of the session's tools."""


class RouteCache:
    """A cache of verified session ids, so that each id in use is verified once.

    A gateway does not learn when a session ends that another gateway opened. The cache therefore
    removes ids without recent calls; a later call verifies them again.

    Args:
        key: the session key of all gateways and servers of the fleet.
        clock: Unix time in seconds.
    """

    def __init__(self, key: SessionKey, clock: Callable[[], float] = time.time) -> None:
        self._key = key
        self._clock = clock
        self._recent: dict[str, Route] = {}
        """Routes that were called since the last rotation."""
        self._previous: dict[str, Route] = {}
        """Routes that were called in the previous interval and not since."""
        self._rotated_s = clock()

    def find(self, session_id: str, tenant: str | None) -> Route:
        """Return the session's route if it belongs to the tenant; None permits any session.

        Raises:
            AuthenticationError: the id was not signed with this key.
            PermissionDeniedError: the session belongs to another tenant.
            SessionLostError: the id has expired.
        """
        route = self.read(session_id)
        if tenant is not None and route.tenant != tenant:
            raise PermissionDeniedError(
                "the session belongs to another tenant; use the token that opened it"
            )
        return route

    def read(self, session_id: str) -> Route:
        """Return the session's route without a check of the tenant.

        Raises:
            AuthenticationError: the id was not signed with this key.
            SessionLostError: the id has expired.
        """
        now_s = self._clock()
        if abs(now_s - self._rotated_s) >= _ROTATION_S or len(self._recent) >= _MAX_ROUTES:
            self._recent, self._previous, self._rotated_s = {}, self._recent, now_s
        route = self._recent.get(session_id)
        if route is None:
            route = self._previous.pop(session_id, None) or self._verify(session_id)
            self._recent[session_id] = route
        if route.expires_s < now_s:
            raise SessionLostError("the session id has expired; open a new session")
        return route

    def _verify(self, session_id: str) -> Route:
        signed_id = self._key.read(session_id)
        return Route(
            signed_id.environment,
            signed_id.server_id,
            signed_id.tenant,
            signed_id.expires_s,
            signed_id.session_id,
            signed_id.is_tools_only,
        )
