"""The caller of a request and the load of an environment, shared by wires, sessions and metrics.

    request --TenantAccess--> Tenant --context variable--> GatewaySessions --> Quotas

Every wire authenticates once per request or connection and stores the tenant in a context
variable. Tasks that the wire starts inherit it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from ludus.proto.errors import AuthenticationError
from ludus.services.gateway.tenancy.tenants import Tenant


@dataclass(frozen=True, slots=True)
class EnvironmentLoad:
    """The number of sessions and servers of one environment."""

    environment: str
    num_pending: int
    """Sessions that waiting opens have requested."""
    num_active: int
    """Sessions on servers that accept new sessions."""
    num_draining: int
    """Sessions on servers that accept no new sessions."""
    capacity: int
    """Maximum sessions on servers that accept new ones; 0 if each session gets its own server."""
    num_servers: int
    """Connected servers that accept new sessions."""
    num_draining_servers: int = 0
    """Connected servers that accept no new sessions."""
    num_unreachable_servers: int = 0
    """Listed servers that do not respond."""


ReadLoads = Callable[[], Sequence[EnvironmentLoad]]
"""Function that returns the current load of every environment; called at each scrape."""

ANONYMOUS = Tenant("")
"""The tenant of every caller if no tenants are configured; it has every scope."""

GATEWAY_TENANT = Tenant("gateway itself")
"""The tenant of calls that the gateway makes itself; other tenants' names contain no space."""

_CURRENT: ContextVar[Tenant] = ContextVar("ludus_gateway_tenant")


def current_tenant() -> Tenant:
    """Return the tenant of the request that is being served.

    Raises:
        AuthenticationError: the wire did not check a token.
    """
    try:
        return _CURRENT.get()
    except LookupError:
        raise AuthenticationError(
            "the request was not checked for a token; put its wire behind Authenticate or"
            " AuthenticateCalls"
        ) from None


def set_current_tenant(tenant: Tenant) -> None:
    """Set the current tenant of this task and of the tasks that it starts."""
    _CURRENT.set(tenant)
