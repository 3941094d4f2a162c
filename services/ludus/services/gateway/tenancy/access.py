"""Who calls a gateway: tokens in, tenants out, on HTTP, WebSocket and gRPC.

    Authorization: Bearer TOKEN            newer clients, and ours
    Authorization: Basic NAME:TOKEN        clients that can set nothing but an address:
              |                            http://NAME:TOKEN@gateway/...
        Authenticate (ASGI), AuthenticateCalls (gRPC) --> Access --> current_tenant()

Tokens are compared as SHA-256 digests, each with every known one in constant time. Nobody is
locked out for wrong ones: tokens are too long to guess, and behind an ingress all clients share
one address. No token reaches a log.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ludus.proto.errors import AuthenticationError, ConfigError, EnvError, UserError
from ludus.services.gateway.tenancy.callers import ANYONE
from ludus.services.gateway.tenancy.tenants import (
    Scope,
    Tenant,
    Tenants,
    TenantsFile,
    check_token,
    token_digest,
)

_log = logging.getLogger(__name__)

_MAX_HEADER_BYTES = 4096
_WAY_OUT = (
    "send `authorization: Bearer <token>`, or put the token into the address:"
    " http://name:<token>@gateway/..."
)


class AuthFailure(StrEnum):
    """Why a call was refused."""

    MISSING = "missing"
    MALFORMED = "malformed"
    UNKNOWN = "unknown"
    SCOPE = "scope"


OnFailure = Callable[[AuthFailure], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A connection that lives long."""

    tenant: Tenant
    scope: Scope
    end: Callable[[EnvError], None]


class Access:
    """Knows the tenants of a gateway.

    Args:
        tenants: none lets everybody in as `ANYONE`.
        source: where the tenants are read again when it has changed.
        check_every_s: the source is looked at no more often than this.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        tenants: Tenants | None,
        source: TenantsFile | None = None,
        *,
        check_every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_failure: OnFailure = _ignore
        """Told of every refusal; for metrics."""
        self._tenants = tenants
        self._source = source
        self._check_every_s = check_every_s
        self._clock = clock
        self._next_check_s = clock() + check_every_s
        self._held: dict[_Held, None] = {}

    @classmethod
    def open(cls) -> Access:
        """Everybody may do everything; see `check_host`."""
        return cls(None)

    @classmethod
    def single(cls, token: str) -> Access:
        """One token that may do everything.

        Raises:
            ConfigError: it is too easily guessed.
        """
        digest = token_digest(check_token(token, "the gateway's token"))
        return cls(Tenants({"": ANYONE}, ((digest, ANYONE),)))

    @classmethod
    def from_file(
        cls,
        path: Path,
        *,
        check_every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> Access:
        """The tenants of a TOML file, followed as it changes.

        A change that cannot be used is logged and leaves the last good tenants.

        Raises:
            NotFoundError: the file is not there.
            ConfigError: it cannot be used; names file, field, value and the way out.
        """
        source = TenantsFile(path)
        return cls(source.read(), source, check_every_s=check_every_s, clock=clock)

    @property
    def is_open(self) -> bool:
        """True when nobody has to authenticate."""
        return self._tenants is None

    def check_host(self, host: str, *, insecure: bool = False) -> None:
        """Refuse a host on which a gateway with this access must not listen.

        Raises:
            ConfigError: other machines reach it, and anybody would be let in.
        """
        if self.is_open and not insecure and not _is_loopback(host):
            raise ConfigError(
                f"expected tenants or a token to listen on {host}, which other machines can"
                " reach, got none; give one, listen on 127.0.0.1, or allow it as insecure"
            )

    def authenticate(self, *authorization: str | bytes) -> Tenant:
        """The tenant whose token the call's Authorization header holds.

        Args:
            authorization: every header of that name; two could mean two people.

        Raises:
            AuthenticationError: no token, or none that is known.
        """
        self._refresh()
        if self._tenants is None:
            return ANYONE
        if not authorization:
            raise self._refusal(AuthFailure.MISSING, "none")
        token = read_authorization(authorization[0]) if len(authorization) == 1 else None
        if token is None:
            raise self._refusal(AuthFailure.MALFORMED, "a header that holds none")
        tenant = _find(self._tenants.digests, token)
        if tenant is None:
            raise self._refusal(AuthFailure.UNKNOWN, "one that no tenant has")
        return tenant

    def knows(self, token: str) -> bool:
        """True when it is a token of this gateway."""
        return (
            self._tenants is not None and _find(self._tenants.digests, token.encode()) is not None
        )

    def renew(self, tenant: Tenant) -> Tenant:
        """The tenant as it is now; for connections that live long.

        Raises:
            AuthenticationError: it was removed since it authenticated, or its token was.
        """
        self._refresh()
        if self._tenants is None:
            return tenant
        now = self._tenants.by_name.get(tenant.name)
        if now is None:
            raise AuthenticationError(
                f"expected a tenant of this gateway, got {tenant.name!r}, which was removed"
            )
        if not tenant.token_digest:
            return now
        owner = self._tenants.by_digest.get(tenant.token_digest)
        if owner is None or owner.name != tenant.name:
            raise AuthenticationError(
                f"expected a token that tenant {tenant.name!r} still has, got one that was"
                " revoked; connect again with another"
            )
        return owner

    def admit(self, tenant: Tenant, scope: Scope) -> Tenant:
        """The tenant as it is now, if it may do this.

        Raises:
            AuthenticationError: it was removed since it authenticated, or its token was.
            PermissionDeniedError: it has not, or no longer, the scope.
        """
        now = self.renew(tenant)
        self.require(now, scope)
        return now

    @contextmanager
    def holding(
        self, tenant: Tenant, scope: Scope, end: Callable[[EnvError], None]
    ) -> Iterator[None]:
        """Hold a connection that lives long; `end` is told once its tenant may not use it."""
        held = _Held(tenant, scope, end)
        self._held[held] = None
        try:
            yield
        finally:
            self._held.pop(held, None)

    def end_refused(self) -> None:
        """End the connections whose tenants were removed, or have lost their token or scope."""
        for held in list(self._held):
            try:
                self.admit(held.tenant, held.scope)
            except EnvError as error:
                del self._held[held]
                held.end(error)

    def require(self, tenant: Tenant, scope: Scope) -> None:
        """Refuse a tenant without the scope, and count it.

        Raises:
            PermissionDeniedError: it has not.
        """
        try:
            tenant.require(scope)
        except EnvError:
            self.on_failure(AuthFailure.SCOPE)
            raise

    def _refusal(self, kind: AuthFailure, found: str) -> AuthenticationError:
        self.on_failure(kind)
        return AuthenticationError(f"expected a token of this gateway, got {found}; {_WAY_OUT}")

    def _refresh(self) -> None:
        if self._source is None or self._clock() < self._next_check_s:
            return
        self._next_check_s = self._clock() + self._check_every_s
        if not self._source.has_changed():
            return
        try:
            self._tenants = self._source.read()
        except UserError as error:
            _log.error("tenants stay as they were: %s", error)
        else:
            _log.info("%d tenants read from %s", len(self._tenants.by_name), self._source.path)


def read_authorization(value: str | bytes) -> bytes | None:
    """The token in an Authorization header; None when it is malformed."""
    raw = value if isinstance(value, bytes) else value.encode("utf-8", "replace")
    if len(raw) > _MAX_HEADER_BYTES:
        return None
    scheme, _, rest = raw.strip().partition(b" ")
    rest = rest.strip()
    if scheme.lower() == b"bearer":
        return rest or None
    if scheme.lower() != b"basic":
        return None
    try:
        user, colon, password = base64.b64decode(rest, validate=True).partition(b":")
    except binascii.Error:
        return None
    return (password or user or None) if colon else None


def _find(digests: tuple[tuple[bytes, Tenant], ...], token: bytes) -> Tenant | None:
    found: Tenant | None = None
    given = token_digest(token)
    for digest, tenant in digests:  # all of them: the time must not tell which it was
        if hmac.compare_digest(digest, given):
            found = tenant
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _ignore(failure: AuthFailure) -> None:
    pass
