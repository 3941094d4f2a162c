"""Who calls the gateway, and how full it is: what its wires, sessions and metrics share.

    request --Access--> Tenant --context variable--> GatewaySessions --> Quotas

Every wire authenticates once per request or connection and puts the tenant into a context
variable; tasks that the wire starts inherit it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from ludus.proto.errors import AuthenticationError
from ludus.services.gateway.tenancy.tenants import Tenant


@dataclass(frozen=True, slots=True)
class EnvironmentLoad:
    """What the gauges say of one environment."""

    environment: str
    num_pending: int
    """Sessions that are waited for."""
    num_active: int
    """Sessions on servers that take new ones."""
    num_draining: int
    """Sessions on servers that take none."""
    capacity: int
    """Sessions that the servers which take new ones can hold; 0 where each session gets its own."""
    num_servers: int
    """Connected servers that take new sessions."""
    num_draining_servers: int = 0
    """Connected servers that take none."""
    num_unreachable_servers: int = 0
    """Servers that are listed and do not answer."""


ReadLoads = Callable[[], Sequence[EnvironmentLoad]]
"""The present load of every environment; read at each scrape, so no series is ever absent."""


ANYONE = Tenant("")
"""The caller where no tenants are configured, which Access says: may do everything."""

ITSELF = Tenant("gateway itself")
"""Who ends sessions that can be spared; no tenant's name has a space."""

_CURRENT: ContextVar[Tenant] = ContextVar("ludus_gateway_tenant")


def current_tenant() -> Tenant:
    """Who is behind the request that is being served.

    Raises:
        AuthenticationError: nobody was asked; a wire lacks its check of tokens.
    """
    try:
        return _CURRENT.get()
    except LookupError:
        raise AuthenticationError(
            "expected a request that was checked for a token, got one that was not; put the"
            " wire behind Authenticate or AuthenticateCalls"
        ) from None


def enter_tenant(tenant: Tenant) -> None:
    """Make it the current one, for this task and the tasks it starts."""
    _CURRENT.set(tenant)
