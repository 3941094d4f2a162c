"""Prometheus metrics of a gateway.

    sessions, wires --plain counters--> GatewayMetrics --at each scrape--> /metrics
    fleets ----------read_loads()-----------^

Counting a call costs a few additions; everything else happens at the scrape. Every series exists
from the start with value zero, because a rate or an alert would miss the first increase of a series
that appears later. Labels have fixed values and never contain a session, tenant or token.

All gateways of a release report the same servers, so their values for servers must not be summed.
docs/security.md has the queries. An autoscaler divides the number of pending and active sessions by
the maximum number of sessions per server.
"""

from __future__ import annotations

import asyncio
import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, product

from prometheus_client import CollectorRegistry, core
from prometheus_client.exposition import choose_encoder

from ludus.proto.errors import ErrorCode
from ludus.proto.metrics import GatewayMetric
from ludus.services.gateway.tenancy.access import AuthFailure

OK = "OK"
"""The code of successful calls."""


@dataclass(frozen=True, slots=True)
class EnvironmentLoad:
    """The number of sessions and servers of one environment."""

    environment: str
    num_pending: int = 0
    """Number of sessions that clients have requested and not yet received."""
    num_active: int = 0
    """Number of sessions on servers that accept new sessions."""
    num_draining: int = 0
    """Number of sessions on servers that accept no new sessions."""
    capacity: int = 0
    """Maximum number of sessions on servers that accept new sessions; 0 if each session gets a new
    server."""
    num_servers: int = 0
    """Number of connected servers that accept new sessions."""
    num_draining_servers: int = 0
    """Number of connected servers that accept no new sessions."""
    num_unreachable_servers: int = 0
    """Number of listed servers that do not respond."""


class CallKind(StrEnum):
    """A kind of call in env.proto."""

    OPEN = "open"
    OPEN_GROUP = "open_group"
    RESET = "reset"
    STEP = "step"
    STATE = "state"
    CALL_TOOL = "call_tool"
    CLOSE = "close"
    DETACH = "detach"


class OpenOutcome(StrEnum):
    """The outcome of a request to open sessions."""

    OPENED = "opened"
    NO_CAPACITY = "no_capacity"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    FAILED = "failed"


_OUTCOME_BY_CODE: dict[str, OpenOutcome] = {
    OK: OpenOutcome.OPENED,
    ErrorCode.CAPACITY_REACHED: OpenOutcome.NO_CAPACITY,
    ErrorCode.RATE_LIMITED: OpenOutcome.RATE_LIMITED,
    ErrorCode.UNAVAILABLE: OpenOutcome.UNAVAILABLE,
    ErrorCode.DRAINING: OpenOutcome.UNAVAILABLE,
    ErrorCode.TIMEOUT: OpenOutcome.TIMEOUT,
}
_COUNTERS: dict[GatewayMetric, tuple[str, dict[str, Iterable[str]]]] = {
    GatewayMetric.CALLS: ("Completed calls.", {"call": CallKind, "code": (OK, *ErrorCode)}),
    GatewayMetric.OPENS: ("Requested sessions.", {"outcome": OpenOutcome}),
    GatewayMetric.SESSIONS_LOST: (
        "Sessions that ended although their callers did not end them.",
        {"reason": ("server_lost",)},
    ),
    GatewayMetric.RATE_LIMITED: ("Calls refused by a tenant's quota.", {}),
}
"""Help text of each counter, and the values of its labels in addition to `env`."""
_HISTOGRAMS: dict[GatewayMetric, tuple[str, dict[str, Iterable[str]], Sequence[float]]] = {
    GatewayMetric.CALL_SECONDS: (
        "Time from a call's arrival at the gateway to its reply.",
        {"call": CallKind},
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    ),
    GatewayMetric.QUEUE_WAIT_SECONDS: (
        "Time that opens waited for a free session.",
        {},
        (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 20, 30, 60),
    ),
}
"""Help text of each histogram, the values of its labels in addition to `env`, and its buckets."""


class _Histogram:
    """A histogram of durations; its last bucket has no upper bound."""

    __slots__ = ("_counts", "_sum", "_upper_bounds")

    def __init__(self, upper_bounds: Sequence[float]) -> None:
        self._upper_bounds = upper_bounds
        self._counts = [0] * (len(upper_bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Add a duration to its bucket."""
        self._counts[bisect_left(self._upper_bounds, seconds)] += 1
        self._sum += seconds

    def read_buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return (upper bound, cumulative count) of each bucket, and the sum of the durations."""
        cumulative_counts = accumulate(list(self._counts))
        bucket_labels = [*(str(float(bound)) for bound in self._upper_bounds), "+Inf"]
        return list(zip(bucket_labels, cumulative_counts, strict=True)), self._sum


class GatewayMetrics:
    """The metrics of a gateway. Call the counting methods on the event loop only.

    Args:
        environments: names of the environments, which are the values of the label `env`.
        read_loads: returns the load of each environment; called at each scrape.
    """

    def __init__(
        self,
        environments: Iterable[str],
        read_loads: Callable[[], Sequence[EnvironmentLoad]] = tuple,
    ) -> None:
        environment_names = self._environments = tuple(environments)
        self._counts = {
            metric: dict.fromkeys(product(environment_names, *labels.values()), 0)
            for metric, (_, labels) in _COUNTERS.items()
        }
        self._histograms = {
            metric: {
                label_values: _Histogram(upper_bounds)
                for label_values in product(environment_names, *labels.values())
            }
            for metric, (_, labels, upper_bounds) in _HISTOGRAMS.items()
        }
        self._auth_failures = dict.fromkeys(AuthFailure, 0)
        self._read_loads = read_loads
        self._loads: Sequence[EnvironmentLoad] = ()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count_call(self, environment: str, call: str, code: str, seconds: float | None) -> None:
        """Count a call that completed after `seconds`.

        Args:
            call: a `CallKind`.
            code: `OK`, or the ErrorCode of the failure.
            seconds: None for refused calls, which have no meaningful duration.
        """
        self._counts[GatewayMetric.CALLS][environment, call, code] += 1
        if seconds is not None:
            self._histograms[GatewayMetric.CALL_SECONDS][environment, call].observe(seconds)
        if code == ErrorCode.RATE_LIMITED:
            self._counts[GatewayMetric.RATE_LIMITED][environment,] += 1

    def count_open(
        self, environment: str, code: str, num_sessions: int, seconds: float | None = None
    ) -> None:
        """Count a request to open one or more sessions; see `count_call`."""
        call = CallKind.OPEN if num_sessions == 1 else CallKind.OPEN_GROUP
        self.count_call(environment, call, code, seconds)
        outcome = _OUTCOME_BY_CODE.get(code, OpenOutcome.FAILED)
        self._counts[GatewayMetric.OPENS][environment, outcome] += num_sessions

    def record_wait(self, environment: str, wait_s: float) -> None:
        """Record how long an open waited in the queue, whether or not it succeeded."""
        self._histograms[GatewayMetric.QUEUE_WAIT_SECONDS][environment,].observe(wait_s)

    def count_lost(self, environment: str, num_sessions: int) -> None:
        """Count sessions that were lost with their server."""
        self._counts[GatewayMetric.SESSIONS_LOST][environment, "server_lost"] += num_sessions

    def count_auth_failure(self, failure: AuthFailure) -> None:
        """Count a refused call; for `TenantAccess.on_failure`."""
        self._auth_failures[failure] += 1

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the body of `/metrics` and its content type.

        A thread renders the body, because that takes some milliseconds per environment.

        Args:
            accept: the scraper's `Accept` header, which may request OpenMetrics.
        """
        self._loads = self._read_loads()
        encode, content_type = choose_encoder(accept)
        return await asyncio.to_thread(encode, self._registry), content_type

    def collect(self) -> Iterator[core.Metric]:
        """Yield every metric family; called by prometheus_client."""
        yield core.InfoMetricFamily(
            GatewayMetric.BUILD,
            "Versions of the gateway and of Python.",
            value={"version": _read_version(), "python": platform.python_version()},
        )
        auth_failures = core.CounterMetricFamily(
            GatewayMetric.AUTH_FAILURES, "Calls refused because of their token.", labels=["kind"]
        )
        for failure, num_calls in self._auth_failures.items():
            auth_failures.add_metric([failure], num_calls)
        yield auth_failures
        yield from self._collect_loads()
        for metric, (help_text, labels) in _COUNTERS.items():
            counter_family = core.CounterMetricFamily(metric, help_text, labels=["env", *labels])
            for label_values, num_calls in self._counts[metric].items():
                counter_family.add_metric(label_values, num_calls)
            yield counter_family
        for metric, (help_text, labels, _) in _HISTOGRAMS.items():
            durations = core.HistogramMetricFamily(metric, help_text, labels=["env", *labels])
            for label_values, histogram in self._histograms[metric].items():
                durations.add_metric(label_values, *histogram.read_buckets())
            yield durations

    def _collect_loads(self) -> Iterator[core.Metric]:
        sessions = core.GaugeMetricFamily(
            GatewayMetric.SESSIONS,
            "Sessions: pending, on servers that accept new sessions, on draining servers.",
            labels=["env", "state"],
        )
        capacity = core.GaugeMetricFamily(
            GatewayMetric.SESSION_CAPACITY,
            "Maximum sessions on servers that accept new sessions.",
            labels=["env"],
        )
        servers = core.GaugeMetricFamily(
            GatewayMetric.SERVERS, "Environment servers.", labels=["env", "state"]
        )
        loads = {load.environment: load for load in self._loads}
        for name in self._environments:
            load = loads.get(name) or EnvironmentLoad(name)
            sessions.add_metric([name, "pending"], load.num_pending)
            sessions.add_metric([name, "active"], load.num_active)
            sessions.add_metric([name, "draining"], load.num_draining)
            capacity.add_metric([name], load.capacity)
            servers.add_metric([name, "ready"], load.num_servers)
            servers.add_metric([name, "draining"], load.num_draining_servers)
            servers.add_metric([name, "unreachable"], load.num_unreachable_servers)
        yield from (sessions, capacity, servers)


def _read_version() -> str:
    try:
        return version("ludus-services")
    except PackageNotFoundError:  # the code runs from a checkout
        return "unknown"
