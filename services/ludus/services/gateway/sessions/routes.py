"""Where the calls of a session go: read from its signed id, and remembered."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ludus.env.security.session_ids import SessionKey
from ludus.proto.errors import PermissionDeniedError, SessionLostError

_MAX_REMEMBERED = 65_536


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
    """Session ids that were verified, so that each is verified once.

    Args:
        key: the same on every gateway and server of the fleet.
        clock: Unix time.
    """

    def __init__(self, key: SessionKey, clock: Callable[[], float] = time.time) -> None:
        self._key = key
        self._clock = clock
        self._known: OrderedDict[str, Route] = OrderedDict()

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
        route = self._known.get(session_id)
        if route is None:
            signed = self._key.read(session_id)
            route = Route(
                signed.environment,
                signed.server_id,
                signed.tenant,
                signed.expires_s,
                signed.session_id,
                signed.is_tools_only,
            )
            self._known[session_id] = route
            if len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
        if route.expires_s < self._clock():
            raise SessionLostError("the session id has expired; open a new session")
        return route
