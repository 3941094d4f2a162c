"""What each tenant uses: sessions at a time, opens and steps a second.

Rates are token buckets that hold one second's worth. A batch that is larger than the bucket
takes from a full one and leaves it in debt, so that batches of any size pass at the tenant's
rate. Counts are those of one gateway process; each gateway of a fleet has its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ludus.proto.errors import InvalidCallError, RateLimitError
from ludus.services.gateway.tenancy.tenants import Tenant, TenantLimits

_SESSIONS_RETRY_S = 1.0
"""When a session of one's own becomes free is not known; asking each second is cheap."""
_SWEEP_AT = 1024
"""Tenants come and go with their file; beyond so many the unused ones are forgotten."""


@dataclass(slots=True)
class _Bucket:
    """Tokens of one rate; below zero after a large batch."""

    tokens: float
    at_s: float

    def take(self, num: int, rate_per_s: float, now_s: float) -> float:
        """Seconds until so many may be taken; 0 when they were taken."""
        burst = max(1.0, rate_per_s)
        self.tokens = min(burst, self.tokens + (now_s - self.at_s) * rate_per_s)
        self.at_s = now_s
        missing = min(float(num), burst) - self.tokens
        if missing > 1e-9:  # rounding must not make a caller that waited wait again
            return missing / rate_per_s
        self.tokens -= num
        return 0.0


@dataclass(slots=True)
class _Usage:
    num_sessions: int = 0
    buckets: dict[str, _Bucket] = field(default_factory=dict)


class Quotas:
    """Counts what tenants use and refuses what is too much; belongs to one event loop.

    Args:
        clock: seconds that only grow.
        renew: the tenant with its present limits, or an error when it was removed since it
            authenticated; connections may be older than the tenants file.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        renew: Callable[[Tenant], Tenant] | None = None,
    ) -> None:
        self._clock = clock
        self._renew = renew
        self._usage: dict[str, _Usage] = {}

    def num_sessions(self, tenant: Tenant) -> int:
        """How many sessions the tenant has now."""
        usage = self._usage.get(tenant.name)
        return usage.num_sessions if usage else 0

    def opening(self, tenant: Tenant, num_sessions: int = 1) -> None:
        """Take sessions from the tenant's quota, all or none; `closed` gives them back.

        Raises:
            RateLimitError: so many are not left, or they were opened too fast.
            InvalidCallError: more at once than the tenant may ever have.
            AuthenticationError: the tenant was removed.
        """
        limits = self._limits_of(tenant)
        usage = self._usage_of(tenant)
        most = limits.max_sessions
        if most is not None and usage.num_sessions + num_sessions > most:
            _refuse_sessions(tenant, num_sessions, usage.num_sessions, most)
        if limits.opens_per_s is not None:
            self._take(tenant, usage, "opens", num_sessions, limits.opens_per_s)
        usage.num_sessions += num_sessions

    def closed(self, tenant: Tenant, num_sessions: int = 1) -> None:
        """Give sessions back."""
        usage = self._usage.get(tenant.name)
        if usage is not None:
            usage.num_sessions = max(0, usage.num_sessions - num_sessions)

    def stepping(self, tenant: Tenant, num_steps: int = 1) -> None:
        """Count steps, once for a whole batch, all or none.

        Raises:
            RateLimitError: too fast; says when to try again.
            AuthenticationError: the tenant was removed.
        """
        rate_per_s = self._limits_of(tenant).steps_per_s
        if rate_per_s is not None and num_steps:
            self._take(tenant, self._usage_of(tenant), "steps", num_steps, rate_per_s)

    def _limits_of(self, tenant: Tenant) -> TenantLimits:
        return (tenant if self._renew is None else self._renew(tenant)).limits

    def _take(self, tenant: Tenant, usage: _Usage, what: str, num: int, rate_per_s: float) -> None:
        now_s = self._clock()
        bucket = usage.buckets.get(what)
        if bucket is None:
            bucket = usage.buckets[what] = _Bucket(max(1.0, rate_per_s), now_s)
        wait_s = bucket.take(num, rate_per_s, now_s)
        if wait_s > 0:
            raise RateLimitError(
                f"expected at most {rate_per_s:g} {what} a second from tenant {tenant.name!r},"
                f" got {num} more; try again in {wait_s:.3g} s, or raise {what}_per_s in the"
                " gateway's tenants file",
                retry_after_s=wait_s,
            )

    def _usage_of(self, tenant: Tenant) -> _Usage:
        usage = self._usage.get(tenant.name)
        if usage is None:
            if len(self._usage) >= _SWEEP_AT:
                self._forget_unused()
            usage = self._usage[tenant.name] = _Usage()
        return usage

    def _forget_unused(self) -> None:
        # A bucket nobody took from for a minute is full again, but for absurd debts.
        since_s = self._clock() - 60.0
        self._usage = {
            name: usage
            for name, usage in self._usage.items()
            if usage.num_sessions or any(b.at_s > since_s for b in usage.buckets.values())
        }


def _refuse_sessions(tenant: Tenant, wanted: int, used: int, most: int) -> None:
    if wanted > most:
        raise InvalidCallError(
            f"expected at most {most} sessions for tenant {tenant.name!r}, got {wanted} at once;"
            " open fewer, or raise max_sessions in the gateway's tenants file"
        )
    raise RateLimitError(
        f"expected at most {most} sessions at a time for tenant {tenant.name!r}, got {wanted}"
        f" more beside {used}; close some, or raise max_sessions in the gateway's tenants file",
        retry_after_s=_SESSIONS_RETRY_S,
    )
