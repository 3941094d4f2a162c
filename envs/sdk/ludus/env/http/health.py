"""The endpoints for Kubernetes and Prometheus: liveness, readiness, draining and metrics.

    kubelet ----> /healthz             200 while the event loop runs
                  /readyz              200, or 503 with the reason why no session can be served
    operator ---> /drain (POST)        refuses new sessions; ?wait=S waits for open sessions
    Prometheus -> /metrics             counters, workers and load

A draining server stays ready, because its open sessions still need its address. If the server has a
token, `/drain` and `/metrics` on the main port require the token. `build_admin_app` serves all four
endpoints without a token, for a port that is only reachable inside the cluster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
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

from ludus.env.asgi.sessions import make_json_response
from ludus.env.sandbox.confine import Layer
from ludus.env.sessions.interface import STEP_BUCKETS_S, SessionCounts, Sessions
from ludus.proto.metrics import EnvServerMetric

MAX_DRAIN_WAIT_S = 3600.0
_DRAIN_POLL_S = 0.1


def build_admin_app(sessions: Sessions) -> Starlette:
    """Build an ASGI application with these routes, which requires no token."""
    return Starlette(routes=make_health_routes(sessions))


def make_health_routes(sessions: Sessions) -> list[Route]:
    """Return the routes. A server is ready while it listens and can serve sessions."""
    registry = CollectorRegistry()
    registry.register(SessionCollector(sessions))

    async def check_liveness(request: Request) -> Response:
        return make_json_response({"status": "ok"})

    async def check_readiness(request: Request) -> Response:
        reason = sessions.unavailable_reason
        if reason:
            return make_json_response({"status": reason}, 503)
        return make_json_response({"status": "ok"})

    async def drain(request: Request) -> Response:
        wait_s = _read_wait_s(request)
        if wait_s is None:
            message = f"wait must be 0 to {MAX_DRAIN_WAIT_S:g} seconds"
            return make_json_response(
                {"detail": {"message": message, "code": "VALIDATION_ERROR"}}, 422
            )
        sessions.drain()
        deadline_s = time.monotonic() + wait_s
        while sessions.load.num_sessions and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        load = sessions.load
        return make_json_response(
            {
                "is_draining": load.is_draining,
                "num_sessions": load.num_sessions,
                "num_waiting": load.num_waiting,
            }
        )

    async def metrics(request: Request) -> Response:
        encode_metrics, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode_metrics(registry), media_type=content_type)

    return [
        Route("/healthz", check_liveness, include_in_schema=False),
        Route("/readyz", check_readiness, include_in_schema=False),
        # Not GET, which any web page can make a browser send.
        Route("/drain", drain, methods=["POST"], include_in_schema=False),
        Route("/metrics", metrics, include_in_schema=False),
    ]


class SessionCollector(Collector):
    """A collector that reads load and counts for each request. Every counter starts at 0."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._name = sessions.description.name

    def describe(self) -> list[Metric]:
        """Return no metrics, because the registration must not read the sessions."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        load = self._sessions.load
        make_gauge = self._make_gauge
        for metric, help_text, count in (
            (EnvServerMetric.SESSIONS, "Open sessions.", load.num_sessions),
            (EnvServerMetric.SESSION_CAPACITY, "Maximum number of sessions.", load.max_sessions),
            (EnvServerMetric.OPENS_WAITING, "Opens that wait for a session.", load.num_waiting),
            (EnvServerMetric.DRAINING, "1 while new sessions are refused.", load.is_draining),
        ):
            yield make_gauge(metric, help_text, count)
        counts, workers = self._sessions.counts, self._sessions.worker_counts
        if counts is not None:
            yield from self._collect_session_counts(counts)
        if workers is not None:
            help_text = "Running worker processes."
            yield make_gauge(EnvServerMetric.WORKERS, help_text, workers.num_workers)
            help_text = "Worker processes that died or were killed."
            yield self._make_counter(
                EnvServerMetric.WORKER_ENDS, help_text, "", {"": workers.num_ended_workers}
            )
            yield self._make_layer_gauge(workers.layers)

    def _collect_session_counts(self, counts: SessionCounts) -> Iterator[Metric]:
        for metric, help_text, count in (
            (EnvServerMetric.OPENS, "Opened sessions.", counts.num_opens),
            (EnvServerMetric.RESETS, "Started episodes.", counts.num_resets),
            (EnvServerMetric.STEPS, "Completed steps.", counts.num_steps),
        ):
            yield self._make_counter(metric, help_text, "", {"": count})
        num_errors = {str(code): count for code, count in counts.num_errors_by_code.items()}
        yield self._make_counter(EnvServerMetric.ERRORS, "Calls that failed.", "code", num_errors)
        num_ends = {str(end): count for end, count in counts.num_ends_by_kind.items()}
        yield self._make_counter(
            EnvServerMetric.SESSION_ENDS, "Sessions that ended.", "reason", num_ends
        )
        cumulative_counts = accumulate(counts.num_steps_by_bucket)
        bounds = [*(str(bound) for bound in STEP_BUCKETS_S), "+Inf"]
        histogram = HistogramMetricFamily(
            EnvServerMetric.STEP_DURATION, "Time from a step's call to its result.", labels=["env"]
        )
        buckets = list(zip(bounds, cumulative_counts, strict=True))
        histogram.add_metric([self._name], buckets, counts.total_step_s)
        yield histogram

    def _make_layer_gauge(self, layers: Mapping[Layer, bool]) -> Metric:
        help_text = "1 if this layer of the workers' sandbox is active."
        metric = GaugeMetricFamily(
            EnvServerMetric.SANDBOX_LAYER, help_text, labels=["env", "layer"]
        )
        for layer, is_active in layers.items():
            metric.add_metric([self._name, layer], is_active)
        return metric

    def _make_gauge(self, name: str, help_text: str, count: float) -> Metric:
        metric = GaugeMetricFamily(name, help_text, labels=["env"])
        metric.add_metric([self._name], count)
        return metric

    def _make_counter(
        self, name: str, help_text: str, label: str, values_by_label: dict[str, int]
    ) -> Metric:
        metric = CounterMetricFamily(name, help_text, labels=["env", *([label] if label else [])])
        for label_value, count in values_by_label.items():
            metric.add_metric([self._name, *([label_value] if label else [])], count)
        return metric


def _read_wait_s(request: Request) -> float | None:
    """Return the seconds in `?wait=`, or None if the value is invalid."""
    try:
        wait_s = float(request.query_params.get("wait", "0"))
    except ValueError:
        return None
    return wait_s if 0 <= wait_s <= MAX_DRAIN_WAIT_S else None
