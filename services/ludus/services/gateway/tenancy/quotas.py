"""Quotas of tenants: concurrent sessions, opens per second and steps per second.

Each rate is limited by a token bucket that holds the tokens of one second. A group that is larger
than the bucket is admitted only when the bucket is full, and makes its count negative. Groups of
any size therefore pass at the tenant's rate. Each gateway process counts separately.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from ludus.proto.errors import InvalidCallError, RateLimitError
from ludus.services.gateway.tenancy.tenants import Tenant

_SESSIONS_RETRY_S = 1.0
"""Retry delay for a refused open, in seconds. It is a guess, because the gateway does not know when
the tenant will close a session."""


@dataclass(slots=True)
class _Bucket:
    """A token bucket of one rate; its number of tokens is negative after a large group."""

    tokens: float
    updated_s: float

    def take(self, num_tokens: int, rate_per_s: float, now_s: float) -> float:
        """Take tokens and return 0, or return the seconds until there are enough tokens."""
        burst = max(1.0, rate_per_s)
        self.tokens = min(burst, self.tokens + (now_s - self.updated_s) * rate_per_s)
        self.updated_s = now_s
        num_missing_tokens = min(float(num_tokens), burst) - self.tokens
        if num_missing_tokens > 1e-9:  # tolerates rounding, so that no caller waits twice
            return num_missing_tokens / rate_per_s
        self.tokens -= num_tokens
        return 0.0


@dataclass(slots=True)
class _Usage:
    """The current use of one tenant's quotas; `buckets` are by resource, for example "steps"."""

    num_sessions: int = 0
    buckets: dict[str, _Bucket] = field(default_factory=dict)


class Quotas:
    """Counters of each tenant's sessions and calls, for use on one event loop.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: defaultdict[str, _Usage] = defaultdict(_Usage)

    def count_sessions(self, tenant: Tenant) -> int:
        """Return the tenant's current number of sessions."""
        return self._usage[tenant.name].num_sessions

    def reserve(self, tenant: Tenant, num_sessions: int = 1) -> None:
        """Reserve sessions of the tenant's quota, all or none, until `release`.

        Raises:
            RateLimitError: the quota has too few sessions left, or the rate is too high.
            InvalidCallError: the number of sessions exceeds the tenant's maximum.
        """
        limits, usage = tenant.limits, self._usage[tenant.name]
        max_sessions = limits.max_sessions
        if max_sessions is not None and num_sessions > max_sessions:
            raise InvalidCallError(
                f"tenant {tenant.name!r} requested {num_sessions} sessions together and may have at"
                f" most {max_sessions}; open fewer, or raise max_sessions in the gateway's tenants"
                " file"
            )
        if max_sessions is not None and usage.num_sessions + num_sessions > max_sessions:
            raise RateLimitError(
                f"tenant {tenant.name!r} requested {num_sessions} more sessions, has"
                f" {usage.num_sessions} and may have at most {max_sessions}; close some, or raise"
                " max_sessions in the gateway's tenants file",
                retry_after_s=_SESSIONS_RETRY_S,
            )
        if limits.opens_per_s is not None:
            self._take(tenant, "opens", num_sessions, limits.opens_per_s)
        usage.num_sessions += num_sessions

    def release(self, tenant: Tenant, num_sessions: int = 1) -> None:
        """Return sessions to the tenant's quota."""
        usage = self._usage[tenant.name]
        usage.num_sessions = max(0, usage.num_sessions - num_sessions)

    def count_step(self, tenant: Tenant) -> None:
        """Count a step, or another call that the quota treats as a step.

        Raises:
            RateLimitError: the rate is too high; the error contains the retry delay.
        """
        rate_per_s = tenant.limits.steps_per_s
        if rate_per_s is not None:
            self._take(tenant, "steps", 1, rate_per_s)

    def _take(self, tenant: Tenant, resource: str, num_tokens: int, rate_per_s: float) -> None:
        now_s = self._clock()
        full_bucket = _Bucket(max(1.0, rate_per_s), now_s)
        bucket = self._usage[tenant.name].buckets.setdefault(resource, full_bucket)
        wait_s = bucket.take(num_tokens, rate_per_s, now_s)
        if wait_s > 0:
            raise RateLimitError(
                f"tenant {tenant.name!r} exceeded its limit of {rate_per_s:g} {resource} per second"
                f" with {num_tokens} more; retry in {wait_s:.3g} s, or raise {resource}_per_s in"
                " the gateway's tenants file",
                retry_after_s=wait_s,
            )
