"""Prometheus metrics of a gateway.

    sessions, wires --plain counters--> GatewayMetrics --at each scrape--> /metrics
    fleets ----------read_loads()-----------^

Counting a call costs a few additions; everything else happens at the scrape. Every series of an
environment starts at zero, so that rates and alerts never see a series appear. Labels come from
fixed sets: no label contains a session, tenant or token.

All gateways of a release report the same servers, so values from servers must not be summed:

    saturation   max by (env) (ludus_gateway_sessions{state="active"})
                   / max by (env) (ludus_gateway_session_capacity)
    waiting      sum by (env) (ludus_gateway_sessions{state="pending"})
    sessions to  max by (env) (ludus_gateway_sessions{state="active"})
    provide for    + sum by (env) (ludus_gateway_sessions{state="pending"})
    lost ratio   sum by (env) (rate(ludus_gateway_sessions_lost_total[5m]))
                   / sum by (env) (rate(ludus_gateway_opens_total{outcome="opened"}[5m]))

Scale on "sessions to provide for", divided by the maximum sessions of one server.
"""

from __future__ import annotations

import asyncio
import platform
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from ludus.proto.errors import ErrorCode
from ludus.proto.metrics import GatewayMetric
from ludus.services.gateway.tenancy.access import AuthFailure
from ludus.services.gateway.tenancy.callers import EnvironmentLoad, ReadLoads

OK = "OK"
"""The code of successful calls."""
CALL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
WAIT_BUCKETS_S = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 20, 30, 60)


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
    """The outcome of an open."""

    OPENED = "opened"
    NO_CAPACITY = "no_capacity"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    FAILED = "failed"


_OUTCOME_OF_CODE: dict[str, OpenOutcome] = {
    ErrorCode.CAPACITY_REACHED: OpenOutcome.NO_CAPACITY,
    ErrorCode.RATE_LIMITED: OpenOutcome.RATE_LIMITED,
    ErrorCode.UNAVAILABLE: OpenOutcome.UNAVAILABLE,
    ErrorCode.DRAINING: OpenOutcome.UNAVAILABLE,
    ErrorCode.TIMEOUT: OpenOutcome.TIMEOUT,
}
_CODES = (OK, *ErrorCode)


class _Histogram:
    """Counts by bucket; the last bucket has no upper bound."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, num: int = 1) -> None:
        """Count a value `num` times."""
        self._counts[bisect_left(self._bounds, value)] += num
        self._sum += value * num

    def sample(self) -> tuple[list[tuple[str, float]], float]:
        """Return cumulative buckets and the sum, in the form of the exposition format."""
        totals = accumulate(list(self._counts))
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, totals, strict=True)), self._sum


@dataclass(slots=True)
class _EnvironmentCounters:
    """The counters of one environment."""

    calls: dict[str, dict[str, int]] = field(
        default_factory=lambda: {call: dict.fromkeys(_CODES, 0) for call in CallKind}
    )
    seconds: dict[str, _Histogram] = field(
        default_factory=lambda: {call: _Histogram(CALL_BUCKETS_S) for call in CallKind}
    )
    wait: _Histogram = field(default_factory=lambda: _Histogram(WAIT_BUCKETS_S))
    opens: dict[OpenOutcome, int] = field(default_factory=lambda: dict.fromkeys(OpenOutcome, 0))
    num_lost: int = 0
    num_rate_limited: int = 0


class GatewayMetrics:
    """Counters and gauges; counts on the event loop, and a scrape may read from any thread.

    Args:
        environments: the names of the environments, which are the values of the label `env`.
        read_loads: returns the load of each environment; called at each scrape.
    """

    def __init__(self, environments: Iterable[str], read_loads: ReadLoads = tuple) -> None:
        self._environments = {name: _EnvironmentCounters() for name in environments}
        self._auth_failures = dict.fromkeys(AuthFailure, 0)
        self._read_loads = read_loads
        self._loads: Sequence[EnvironmentLoad] = ()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count_calls(
        self, environment: str, call: str, code: str, seconds: float | None, num_calls: int = 1
    ) -> None:
        """Count calls, other than opens, that completed together after `seconds`.

        Args:
            call: a `CallKind`.
            code: `OK`, or the ErrorCode of the failure.
            seconds: None for refused calls, which have no meaningful duration.
        """
        counters = self._environments[environment]
        counters.calls[call][code] += num_calls
        if seconds is not None:
            counters.seconds[call].observe(seconds, num_calls)
        if code == ErrorCode.RATE_LIMITED:
            counters.num_rate_limited += num_calls

    def count_opened(self, environment: str, num_sessions: int, seconds: float) -> None:
        """Count sessions that were opened together, `seconds` after the request."""
        call = CallKind.OPEN if num_sessions == 1 else CallKind.OPEN_GROUP
        counters = self._environments[environment]
        counters.calls[call][OK] += 1
        counters.seconds[call].observe(seconds)
        counters.opens[OpenOutcome.OPENED] += num_sessions

    def count_refused(
        self, environment: str, code: str, num_sessions: int = 1, seconds: float | None = None
    ) -> None:
        """Count an open that failed with an ErrorCode."""
        call = CallKind.OPEN if num_sessions == 1 else CallKind.OPEN_GROUP
        counters = self._environments[environment]
        counters.calls[call][code] += 1
        if seconds is not None:
            counters.seconds[call].observe(seconds)
        counters.opens[_OUTCOME_OF_CODE.get(code, OpenOutcome.FAILED)] += num_sessions
        if code == ErrorCode.RATE_LIMITED:
            counters.num_rate_limited += 1

    def record_wait(self, environment: str, seconds: float) -> None:
        """Record the time that an open waited in the queue, with or without success."""
        self._environments[environment].wait.observe(seconds)

    def count_lost(self, environment: str, num_sessions: int) -> None:
        """Count sessions that ended although their callers did not end them."""
        self._environments[environment].num_lost += num_sessions

    def count_auth_failure(self, failure: AuthFailure) -> None:
        """Count a refused call; for `TenantAccess.on_failure`."""
        self._auth_failures[failure] += 1

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the body of `/metrics` and its content type.

        A thread renders the body, which takes some milliseconds per environment.

        Args:
            accept: the scraper's `Accept` header, which may request OpenMetrics.
        """
        self._loads = self._read_loads()
        encode, content_type = choose_encoder(accept)
        return await asyncio.to_thread(encode, self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family; called by prometheus_client."""
        yield InfoMetricFamily(
            GatewayMetric.BUILD,
            "Versions of the gateway and of Python.",
            value={"version": _version(), "python": platform.python_version()},
        )
        failures = CounterMetricFamily(
            GatewayMetric.AUTH_FAILURES, "Calls refused because of their token.", labels=["kind"]
        )
        for kind, num in self._auth_failures.items():
            failures.add_metric([kind], num)
        yield failures
        yield from self._collect_loads()
        yield from self._collect_calls()
        yield from self._collect_opens()

    def _collect_loads(self) -> Iterator[Metric]:
        sessions = GaugeMetricFamily(
            GatewayMetric.SESSIONS,
            "Sessions: pending, on servers that accept new sessions, on draining servers.",
            labels=["env", "state"],
        )
        capacity = GaugeMetricFamily(
            GatewayMetric.SESSION_CAPACITY,
            "Maximum sessions on servers that accept new sessions.",
            labels=["env"],
        )
        servers = GaugeMetricFamily(
            GatewayMetric.SERVERS, "Environment servers.", labels=["env", "state"]
        )
        loads = {load.environment: load for load in self._loads}
        for name in self._environments:
            load = loads.get(name) or EnvironmentLoad(name, 0, 0, 0, 0, 0)
            sessions.add_metric([name, "pending"], load.num_pending)
            sessions.add_metric([name, "active"], load.num_active)
            sessions.add_metric([name, "draining"], load.num_draining)
            capacity.add_metric([name], load.capacity)
            servers.add_metric([name, "ready"], load.num_servers)
            servers.add_metric([name, "draining"], load.num_draining_servers)
            servers.add_metric([name, "unreachable"], load.num_unreachable_servers)
        yield from (sessions, capacity, servers)

    def _collect_calls(self) -> Iterator[Metric]:
        calls = CounterMetricFamily(
            GatewayMetric.CALLS, "Completed calls.", labels=["env", "call", "code"]
        )
        seconds = HistogramMetricFamily(
            GatewayMetric.CALL_SECONDS,
            "Time from a call's arrival at the gateway to its reply.",
            labels=["env", "call"],
        )
        for name, counters in self._environments.items():
            for call, codes in counters.calls.items():
                for code, num in codes.items():
                    calls.add_metric([name, call, code], num)
                seconds.add_metric([name, call], *counters.seconds[call].sample())
        yield from (calls, seconds)

    def _collect_opens(self) -> Iterator[Metric]:
        opens = CounterMetricFamily(
            GatewayMetric.OPENS, "Requested sessions.", labels=["env", "outcome"]
        )
        lost_sessions = CounterMetricFamily(
            GatewayMetric.SESSIONS_LOST,
            "Sessions that ended although their callers did not end them.",
            labels=["env", "reason"],
        )
        limited = CounterMetricFamily(
            GatewayMetric.RATE_LIMITED, "Calls refused by a tenant's quota.", labels=["env"]
        )
        wait = HistogramMetricFamily(
            GatewayMetric.QUEUE_WAIT_SECONDS,
            "Time that opens waited for a free session.",
            labels=["env"],
        )
        for name, counters in self._environments.items():
            for outcome, num in counters.opens.items():
                opens.add_metric([name, outcome], num)
            lost_sessions.add_metric([name, "server_lost"], counters.num_lost)
            limited.add_metric([name], counters.num_rate_limited)
            wait.add_metric([name], *counters.wait.sample())
        yield from (opens, lost_sessions, limited, wait)


def _version() -> str:
    try:
        return version("ludus-services")
    except PackageNotFoundError:  # runs from a checkout
        return "unknown"
