"""Authentication of a gateway's callers over HTTP, WebSocket and gRPC.

    Authorization: Bearer TOKEN            clients that can set a header
    Authorization: Basic NAME:TOKEN        clients that can only set an address:
              |                            http://NAME:TOKEN@gateway/...
    AuthenticationMiddleware (ASGI), AuthenticationInterceptor (gRPC)
              |
        TenantAccess --> get_current_tenant()

The SHA-256 digest of a token is compared in constant time with the digest of every valid token.
Wrong tokens do not lock a client out: tokens are too long to guess, and all clients behind an
ingress share one address. Tokens are never logged.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from ludus.env.security.hosts import is_loopback_name
from ludus.env.security.secret_files import FollowedFile
from ludus.proto.errors import (
    AuthenticationError,
    ConfigError,
    EnvError,
    PermissionDeniedError,
)
from ludus.services.gateway.tenancy.tenants import (
    ANONYMOUS,
    Scope,
    Tenant,
    Tenants,
    TenantsFile,
    TokensFile,
    check_token,
    hash_token,
)

_log = logging.getLogger(__name__)

_MAX_HEADER_BYTES = 4096
_REMEDY = (
    "send `authorization: Bearer <token>`, or put the token into the address:"
    " http://name:<token>@gateway/..."
)


class AuthFailure(StrEnum):
    """A reason for refusing a call."""

    MISSING = "missing"
    MALFORMED = "malformed"
    UNKNOWN = "unknown"
    SCOPE = "scope"


class TenantAccess:
    """The tenants of a gateway, and the authentication of their callers.

    Args:
        tenants: tenants of the gateway. None admits every caller as `ANONYMOUS`.
        followed_tenants: file from which the tenants are reloaded after a change, instead of
            `tenants`.
    """

    def __init__(
        self,
        tenants: Tenants | None = None,
        followed_tenants: FollowedFile[Tenants] | None = None,
    ) -> None:
        self.on_failure: Callable[[AuthFailure], None] = lambda failure: None
        """Function that is called with the reason for each refusal, for metrics."""
        self._fixed_tenants = tenants
        self._followed_tenants = followed_tenants
        self._open_connections: dict[Callable[[EnvError], None], Tenant] = {}
        """Tenant of each long-lived connection, by the function that closes the connection."""

    @classmethod
    def from_token(cls, token: str) -> TenantAccess:
        """Return a TenantAccess with one token that has every scope."""
        digest = hash_token(check_token(token, "the gateway's token"))
        return cls(Tenants({"": ANONYMOUS}, {digest: ANONYMOUS}))

    @classmethod
    def from_file(cls, path: Path, *, clock: Callable[[], float] = time.monotonic) -> TenantAccess:
        """Read the tenants from a TOML file, and reload them after each change of the file.

        If a changed file is invalid, an error is logged and the previous tenants remain.
        """
        return cls(followed_tenants=FollowedFile(TenantsFile(path), clock=clock))

    @classmethod
    def from_token_file(
        cls, path: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> TenantAccess:
        """Read tokens that have every scope from a file, and reload them after each change."""
        return cls(followed_tenants=FollowedFile(TokensFile(path), clock=clock))

    @property
    def _tenants(self) -> Tenants | None:
        followed_tenants = self._followed_tenants
        return self._fixed_tenants if followed_tenants is None else followed_tenants.current

    def check_host(self, host: str, *, insecure: bool = False) -> None:
        """Check that the gateway may listen on the host.

        Raises:
            ConfigError: other machines could call the gateway without a token.
        """
        if self._tenants is None and not insecure and not is_loopback_name(host):
            raise ConfigError(
                f"listening on {host}, which other machines can reach, needs tenants or a token;"
                " set one, listen on 127.0.0.1, or set insecure to allow it"
            )

    def authenticate(self, *authorization: str | bytes) -> Tenant:
        """Return the tenant of the token in a call's Authorization header.

        Args:
            authorization: all Authorization headers of the call; more than one is refused.

        Raises:
            AuthenticationError: the token is missing, malformed or unknown.
        """
        tenants = self._tenants
        if tenants is None:
            return ANONYMOUS
        if not authorization:
            raise self._count_refusal(AuthFailure.MISSING, "no Authorization header")
        token = read_authorization(authorization[0]) if len(authorization) == 1 else None
        if token is None:
            raise self._count_refusal(AuthFailure.MALFORMED, "a malformed Authorization header")
        tenant = _find_tenant(tenants, token)
        if tenant is None:
            raise self._count_refusal(AuthFailure.UNKNOWN, "an unknown token")
        return tenant

    def has_token(self, token: str) -> bool:
        """Return whether the token belongs to a tenant of this gateway."""
        tenants = self._tenants
        return tenants is not None and _find_tenant(tenants, token.encode()) is not None

    def admit(self, tenant: Tenant) -> Tenant:
        """Return a connected tenant with its current scopes and limits, which may have changed.

        Raises:
            AuthenticationError: the tenant or its token was removed after the connection was made.
            PermissionDeniedError: the tenant no longer has the scope `step`.
        """
        current_tenant = self._find_current_tenant(tenant)
        self.require_scope(current_tenant, Scope.STEP)
        return current_tenant

    def _find_current_tenant(self, tenant: Tenant) -> Tenant:
        tenants = self._tenants
        if tenants is None:
            return tenant
        current_tenant = tenants.by_name.get(tenant.name)
        if current_tenant is None:
            raise AuthenticationError(f"tenant {tenant.name!r} was removed from this gateway")
        if not tenant.token_digest:
            return current_tenant
        owner = tenants.by_digest.get(tenant.token_digest)
        if owner is None or owner.name != tenant.name:
            raise AuthenticationError(
                f"the token of tenant {tenant.name!r} was revoked; connect again with another token"
            )
        return owner

    @contextmanager
    def track_connection(self, tenant: Tenant, close: Callable[[EnvError], None]) -> Iterator[None]:
        """Track a long-lived connection while the context is active.

        Args:
            close: called with the error once the tenant may no longer use the connection.
        """
        self._open_connections[close] = tenant
        try:
            yield
        finally:
            self._open_connections.pop(close, None)

    def close_refused_connections(self) -> None:
        """Close the connections whose tenants were removed or lost their token or scope."""
        for close, tenant in list(self._open_connections.items()):
            try:
                self.admit(tenant)
            except EnvError as error:
                del self._open_connections[close]
                close(error)

    def require_scope(self, tenant: Tenant, scope: Scope) -> None:
        """Check that the tenant has the scope; count the refusal if it does not.

        Raises:
            PermissionDeniedError: the tenant does not have the scope.
        """
        if scope not in tenant.scopes:
            self.on_failure(AuthFailure.SCOPE)
            raise PermissionDeniedError(
                f"the call needs the scope {scope!s}, but tenant {tenant.name!r} has only"
                f" {', '.join(sorted(tenant.scopes))}; use another token, or add the scope to the"
                " tenant in the gateway's tenants file"
            )

    def _count_refusal(self, failure: AuthFailure, problem: str) -> AuthenticationError:
        self.on_failure(failure)
        return AuthenticationError(f"expected a token of this gateway, got {problem}; {_REMEDY}")


def read_authorization(header: str | bytes) -> bytes | None:
    """Return the token in an Authorization header, or None if the header is malformed."""
    header_bytes = header if isinstance(header, bytes) else header.encode("utf-8", "replace")
    if len(header_bytes) > _MAX_HEADER_BYTES:
        return None
    scheme, _, credentials = header_bytes.strip().partition(b" ")
    credentials = credentials.strip()
    if scheme.lower() == b"bearer":
        return credentials or None
    if scheme.lower() != b"basic":
        return None
    try:
        user, colon, password = base64.b64decode(credentials, validate=True).partition(b":")
    except binascii.Error:
        return None
    return (password or user or None) if colon else None


def _find_tenant(tenants: Tenants, token: bytes) -> Tenant | None:
    owner: Tenant | None = None
    caller_digest = hash_token(token)
    # The loop has no early exit, so that the response time does not reveal which token matched.
    for digest, tenant in tenants.by_digest.items():
        if hmac.compare_digest(digest, caller_digest):
            owner = tenant
    return owner
