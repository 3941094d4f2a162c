"""Who calls a gateway: tokens in, tenants out, on HTTP, WebSocket and gRPC.

    Authorization: Bearer TOKEN            newer clients, and ours
    Authorization: Basic NAME:TOKEN        older clients, from http://NAME:TOKEN@gateway/...
    /t/TOKEN/envs/...                      clients that can set nothing but an address
              |
        Authenticate (ASGI), AuthenticateCalls (gRPC) --> Access --> current_tenant()

Tokens are compared as SHA-256 digests, each with every known one in constant time. An address
that keeps failing is refused for a while; tokens that worked from there before still do, so
that one wrong client behind a proxy does not lock out the others. No token reaches a log.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ludus.proto.errors import (
    AuthenticationError,
    ConfigError,
    EnvError,
    RateLimitError,
    UserError,
)
from ludus.services.gateway.tenancy.callers import ANYONE
from ludus.services.gateway.tenancy.tenants import (
    Scope,
    Tenant,
    TenantLimits,
    Tenants,
    TenantsFile,
    check_token,
    token_digest,
)

__all__ = [
    "Access",
    "AuthFailure",
    "Scope",
    "Tenant",
    "TenantLimits",
]

_log = logging.getLogger(__name__)

_MAX_HEADER_BYTES = 4096
_MAX_ADDRESSES = 4096
_MAX_FAILURES = 20
"""So many wrong tokens an address may send at once, and then one each `_PER_FAILURE_S`."""
_PER_FAILURE_S = 3.0
_WAY_OUT = (
    "send `authorization: Bearer <token>`, or put the token into the address:"
    " http://name:<token>@gateway/... or http://gateway/t/<token>/..."
)


class AuthFailure(StrEnum):
    """Why a call was refused."""

    MISSING = "missing"
    MALFORMED = "malformed"
    UNKNOWN = "unknown"
    BLOCKED = "blocked"
    SCOPE = "scope"


OnFailure = Callable[[AuthFailure], None]


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
        self._addresses = _Addresses(clock)

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
        """Returns when a gateway with this access may listen on the host.

        Raises:
            ConfigError: other machines reach it, and anybody would be let in.
        """
        if self.is_open and not insecure and not _is_loopback(host):
            raise ConfigError(
                f"expected tenants or a token to listen on {host}, which other machines can"
                " reach, got none; give one, listen on 127.0.0.1, or allow it as insecure"
            )

    def authenticate(
        self, authorization: str | bytes | None, path_token: str | None = None, peer: str = ""
    ) -> Tenant:
        """The tenant whose token this is.

        Args:
            authorization: the header's value; when it is there, a token in the path is not
                looked at.
            path_token: from `/t/<token>/...`.
            peer: the address of whoever calls; failures are counted by it.

        Raises:
            AuthenticationError: no token, or none that is known.
            RateLimitError: the address has failed too often.
        """
        self._refresh()
        if self._tenants is None:
            return ANYONE
        if authorization is None and path_token is None:
            raise self._refusal(AuthFailure.MISSING, peer, "none")
        if authorization is not None:
            tokens = read_authorization(authorization)
        else:
            tokens = [(path_token or "").encode("utf-8", "replace")]
        tenant = _find(self._tenants.digests, tokens)
        wait_s = self._addresses.blocked_for_s(peer, tenant)
        if wait_s > 0:
            self.on_failure(AuthFailure.BLOCKED)
            raise RateLimitError(
                "expected a right token, got too many wrong ones from this address;"
                f" try again in {wait_s:.0f} s",
                retry_after_s=wait_s,
            )
        if tenant is None:
            kind = AuthFailure.UNKNOWN if tokens else AuthFailure.MALFORMED
            found = "one that no tenant has" if tokens else "a header that holds none"
            raise self._refusal(kind, peer, found)
        self._addresses.remember(peer, tenant)
        return tenant

    def renew(self, tenant: Tenant) -> Tenant:
        """The tenant as it is now; for connections that live long.

        Raises:
            AuthenticationError: it was removed since it authenticated.
        """
        self._refresh()
        if self._tenants is None:
            return tenant
        now = self._tenants.by_name.get(tenant.name)
        if now is None:
            raise AuthenticationError(
                f"expected a tenant of this gateway, got {tenant.name!r}, which was removed"
            )
        return now

    def require(self, tenant: Tenant, scope: Scope) -> None:
        """Returns when the tenant has the scope; counts it when not.

        Raises:
            PermissionDeniedError: it has not.
        """
        try:
            tenant.require(scope)
        except EnvError:
            self.on_failure(AuthFailure.SCOPE)
            raise

    def _refusal(self, kind: AuthFailure, peer: str, found: str) -> AuthenticationError:
        if kind is not AuthFailure.MISSING:  # nothing was guessed
            self._addresses.add_failure(peer)
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


def read_authorization(value: str | bytes) -> list[bytes]:
    """The tokens that an Authorization header may mean; none when it is malformed."""
    raw = value if isinstance(value, bytes) else value.encode("utf-8", "replace")
    if len(raw) > _MAX_HEADER_BYTES:
        return []
    scheme, _, rest = raw.strip().partition(b" ")
    rest = rest.strip()
    if not rest:
        return []
    if scheme.lower() == b"bearer":
        return [rest]
    if scheme.lower() != b"basic":
        return []
    try:
        decoded = base64.b64decode(rest, validate=True)
    except binascii.Error:
        return []
    user, colon, password = decoded.partition(b":")
    token = password or user
    return [token] if colon and token else []


def address_of(peer: str) -> str:
    """What failures are counted by: an IPv4 address, or an IPv6 network of 64 bits.

    Args:
        peer: a host, or gRPC's `ipv4:host:port`, `ipv6:[host]:port`, `unix:path`.
    """
    kind, _, rest = peer.partition(":")
    if kind in ("ipv4", "ipv6"):
        host = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
    else:
        host = peer
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return peer[:64]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        # One machine usually has a whole network of them.
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)


@dataclass(slots=True)
class _Address:
    failures: float = 0.0
    """Leaks away by one each `_PER_FAILURE_S`."""
    at_s: float = 0.0
    seen: set[str] = field(default_factory=set)
    """Tenants that have authenticated from here."""


class _Addresses:
    """What is remembered of those who call; the longest silent are forgotten first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[str, _Address] = OrderedDict()

    def blocked_for_s(self, peer: str, tenant: Tenant | None) -> float:
        """How long the address has to wait; 0 lets it try."""
        known = self._known.get(address_of(peer))
        if known is None or (tenant is not None and tenant.name in known.seen):
            return 0.0
        self._leak(known)
        if known.failures <= _MAX_FAILURES - 1:
            return 0.0
        return math.ceil((known.failures - _MAX_FAILURES + 1) * _PER_FAILURE_S)

    def add_failure(self, peer: str) -> None:
        """Counts a wrong token."""
        known = self._touch(peer)
        self._leak(known)
        known.failures += 1

    def remember(self, peer: str, tenant: Tenant) -> None:
        """Notes that the tenant calls from there."""
        self._touch(peer).seen.add(tenant.name)

    def _touch(self, peer: str) -> _Address:
        address = address_of(peer)
        known = self._known.get(address)
        if known is None:
            known = self._known[address] = _Address(at_s=self._clock())
            if len(self._known) > _MAX_ADDRESSES:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(address)
        return known

    def _leak(self, known: _Address) -> None:
        now_s = self._clock()
        known.failures = max(0.0, known.failures - (now_s - known.at_s) / _PER_FAILURE_S)
        known.at_s = now_s


def _find(digests: tuple[tuple[bytes, Tenant], ...], tokens: list[bytes]) -> Tenant | None:
    found: Tenant | None = None
    for token in tokens:
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
