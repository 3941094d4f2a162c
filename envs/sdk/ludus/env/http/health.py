"""The endpoints for Kubernetes and Prometheus: liveness, readiness, draining and metrics.

    kubelet ----> /healthz             200 while the event loop runs
                  /readyz              200, or 503 with the reason why no session can be served
    preStop ----> /drain               refuses new sessions; ?wait=S waits for open sessions
    Prometheus -> /metrics             counters, workers and load

A draining server stays ready, because its open sessions still need its address. If the server has a
token, `/drain` and `/metrics` on the main port require the token. `build_admin_app` serves all four
endpoints without a token, for a port that is only reachable inside the cluster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ludus.env.asgi.sessions import json_response
from ludus.env.sandbox.confine import Layer
from ludus.env.sessions.interface import STEP_BUCKETS_S, SessionCounts, Sessions
from ludus.proto.metrics import EnvServerMetric

MAX_DRAIN_WAIT_S = 3600.0
_DRAIN_POLL_S = 0.1


def build_admin_app(sessions: Sessions) -> Starlette:
    """Build an ASGI application with these routes, which requires no token."""
    # A preStop hook can only send GET.
    return Starlette(routes=health_routes(sessions, drain_methods=("GET", "POST")))


def health_routes(sessions: Sessions, drain_methods: Sequence[str] = ("POST",)) -> list[Route]:
    """Return the routes. A server is ready while it listens and can serve sessions.

    Args:
        drain_methods: HTTP methods of `/drain`. GET is unsafe on a port that a browser can reach,
            because any web page can send it.
    """
    registry = CollectorRegistry()
    registry.register(SessionCollector(sessions))

    async def healthz(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def readyz(request: Request) -> Response:
        reason = sessions.unavailable_reason
        return json_response({"status": reason}, 503) if reason else json_response({"status": "ok"})

    async def drain(request: Request) -> Response:
        wait_s = _read_wait_s(request)
        if wait_s is None:
            message = f"wait must be 0 to {MAX_DRAIN_WAIT_S:g} seconds"
            return json_response({"detail": {"message": message, "code": "VALIDATION_ERROR"}}, 422)
        sessions.drain()
        deadline_s = time.monotonic() + wait_s
        while sessions.load.num_sessions and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        load = sessions.load
        return json_response(
            {
                "is_draining": load.is_draining,
                "num_sessions": load.num_sessions,
                "num_waiting": load.num_waiting,
            }
        )

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    return [
        Route("/healthz", healthz, include_in_schema=False),
        Route("/readyz", readyz, include_in_schema=False),
        Route("/drain", drain, methods=list(drain_methods), include_in_schema=False),
        Route("/metrics", metrics, include_in_schema=False),
    ]


class SessionCollector(Collector):
    """A collector that reads load and counts on request. All series exist from the start."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._name = sessions.description.name

    def describe(self) -> list[Metric]:
        """Return no metrics, because the registration must not read the sessions."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        load = self._sessions.load
        gauge = self._gauge
        yield gauge(EnvServerMetric.SESSIONS, "Open sessions.", load.num_sessions)
        yield gauge(
            EnvServerMetric.SESSION_CAPACITY, "Maximum number of sessions.", load.max_sessions
        )
        yield gauge(
            EnvServerMetric.OPENS_WAITING, "Opens that wait for a session.", load.num_waiting
        )
        yield gauge(
            EnvServerMetric.DRAINING, "1 while the server refuses new sessions.", load.is_draining
        )
        counts, workers = self._sessions.counts, self._sessions.worker_counts
        if counts is not None:
            yield from self._collect_counts(counts)
        if workers is not None:
            text = "Running worker processes."
            yield gauge(EnvServerMetric.WORKERS, text, workers.num_workers)
            text = "Worker processes that died or were killed."
            yield self._counter(EnvServerMetric.WORKER_ENDS, text, "", {"": workers.num_ends})
            yield self._layers(workers.layers)

    def _collect_counts(self, counts: SessionCounts) -> Iterator[Metric]:
        for metric, text, value in (
            (EnvServerMetric.OPENS, "Opened sessions.", counts.num_opened),
            (EnvServerMetric.RESETS, "Started episodes.", counts.num_resets),
            (EnvServerMetric.STEPS, "Completed steps.", counts.num_steps),
        ):
            yield self._counter(metric, text, "", {"": value})
        errors: dict[str, int] = {str(code): n for code, n in counts.num_errors.items()}
        yield self._counter(EnvServerMetric.ERRORS, "Calls that failed.", "code", errors)
        ends: dict[str, int] = {str(end): n for end, n in counts.num_ends.items()}
        yield self._counter(EnvServerMetric.SESSION_ENDS, "Sessions that ended.", "reason", ends)
        cumulative = accumulate(counts.num_steps_by_bucket)
        bounds = [*(str(bound) for bound in STEP_BUCKETS_S), "+Inf"]
        histogram = HistogramMetricFamily(
            EnvServerMetric.STEP_DURATION, "Time from a step's call to its result.", labels=["env"]
        )
        histogram.add_metric(
            [self._name], list(zip(bounds, cumulative, strict=True)), counts.step_seconds
        )
        yield histogram

    def _layers(self, layers: Mapping[Layer, bool]) -> Metric:
        text = "1 if this layer of the workers' sandbox is active."
        family = GaugeMetricFamily(EnvServerMetric.SANDBOX_LAYER, text, labels=["env", "layer"])
        for layer, is_active in layers.items():
            family.add_metric([self._name, layer], is_active)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["env"])
        family.add_metric([self._name], value)
        return family

    def _counter(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["env", *([label] if label else [])])
        for label_value, value in values.items():
            family.add_metric([self._name, *([label_value] if label else [])], value)
        return family


def _read_wait_s(request: Request) -> float | None:
    """Return the seconds in `?wait=`, or None if the value is invalid."""
    try:
        wait_s = float(request.query_params.get("wait", "0"))
    except ValueError:
        return None
    return wait_s if 0 <= wait_s <= MAX_DRAIN_WAIT_S else None
