"""What Kubernetes and Prometheus ask a server: alive, ready, drain, metrics.

    kubelet ----> /healthz             yes, while the event loop runs
                  /readyz              yes, or 503 and why no session can be served
    preStop ----> /drain               no new sessions from now on; ?wait=S waits for the old
    Prometheus -> /metrics             what was counted, workers, and the load

A draining server stays ready: its open sessions still need its address. With a token the
main port gives `/drain` and `/metrics` to its holders only; `build_admin_app` serves all four
without one, for a port that only the cluster reaches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import orjson
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

from ludus.env.sandbox.confine import Layer
from ludus.env.sessions.interface import Sessions
from ludus.env.sessions.metrics import STEP_BUCKETS_S, SessionCounts
from ludus.proto.metrics import EnvServerMetric

MAX_DRAIN_WAIT_S = 3600.0
_DRAIN_POLL_S = 0.1


def build_admin_app(sessions: Sessions) -> Starlette:
    """An ASGI application of these routes alone; it asks for no token."""
    # A preStop hook can send nothing but GET.
    return Starlette(routes=health_routes(sessions, drain_methods=("GET", "POST")))


def health_routes(sessions: Sessions, drain_methods: Sequence[str] = ("POST",)) -> list[Route]:
    """The routes; a server is ready as soon as it listens, until nothing can be served any more.

    Args:
        drain_methods: a GET that changes something can be asked for by any page in a browser.
    """
    registry = CollectorRegistry()
    registry.register(SessionCollector(sessions))

    async def is_well(request: Request) -> Response:
        return _json({"status": "ok"})

    async def is_ready(request: Request) -> Response:
        trouble = sessions.trouble
        return _json({"status": trouble}, 503) if trouble else _json({"status": "ok"})

    async def drain_now(request: Request) -> Response:
        wait_s = _wait_of(request)
        if wait_s is None:
            message = f"expected wait to be 0 to {MAX_DRAIN_WAIT_S:g} seconds"
            return _json({"detail": {"message": message, "code": "VALIDATION_ERROR"}}, 422)
        sessions.drain()
        deadline_s = time.monotonic() + wait_s
        while sessions.load.num_sessions and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        load = sessions.load
        return _json(
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
        Route("/healthz", is_well, include_in_schema=False),
        Route("/readyz", is_ready, include_in_schema=False),
        Route("/drain", drain_now, methods=list(drain_methods), include_in_schema=False),
        Route("/metrics", metrics, include_in_schema=False),
    ]


class SessionCollector(Collector):
    """Reads load and counts when metrics are asked for; every series exists from the start."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._name = sessions.description.name

    def describe(self) -> list[Metric]:
        """No metrics: registering must not read the sessions."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics as they stand."""
        load = self._sessions.load
        gauge = self._gauge
        yield gauge(EnvServerMetric.SESSIONS, "Sessions that are open.", load.num_sessions)
        yield gauge(
            EnvServerMetric.SESSION_CAPACITY, "Sessions it holds at most.", load.max_sessions
        )
        yield gauge(
            EnvServerMetric.OPENS_WAITING, "Opens that wait for a session.", load.num_waiting
        )
        yield gauge(
            EnvServerMetric.DRAINING, "1 while no new sessions are taken.", load.is_draining
        )
        counts, workers = self._sessions.counts, self._sessions.workers
        if counts is not None:
            yield from self._counted(counts)
        if workers is not None:
            text = "Worker processes that live."
            yield gauge(EnvServerMetric.WORKERS, text, workers.num_workers)
            text = "Worker processes that died or were killed."
            yield self._counter(EnvServerMetric.WORKER_ENDS, text, "", {"": workers.num_ends})
            yield self._layers(workers.layers)

    def _counted(self, counts: SessionCounts) -> Iterator[Metric]:
        for metric, text, value in (
            (EnvServerMetric.OPENS, "Sessions that were opened.", counts.num_opened),
            (EnvServerMetric.RESETS, "Episodes that were started.", counts.num_resets),
            (EnvServerMetric.STEPS, "Steps that were answered.", counts.num_steps),
        ):
            yield self._counter(metric, text, "", {"": value})
        errors: dict[str, int] = {str(code): n for code, n in counts.num_errors.items()}
        yield self._counter(EnvServerMetric.ERRORS, "Calls that failed.", "code", errors)
        ends: dict[str, int] = {str(end): n for end, n in counts.num_ends.items()}
        yield self._counter(EnvServerMetric.SESSION_ENDS, "Sessions that ended.", "reason", ends)
        cumulative = accumulate(counts.num_steps_by_bucket)
        bounds = [*(str(bound) for bound in STEP_BUCKETS_S), "+Inf"]
        histogram = HistogramMetricFamily(
            EnvServerMetric.STEP_DURATION, "From call to answer of a step.", labels=["env"]
        )
        histogram.add_metric(
            [self._name], list(zip(bounds, cumulative, strict=True)), counts.step_seconds
        )
        yield histogram

    def _layers(self, layers: Mapping[Layer, bool]) -> Metric:
        text = "1 where this layer of the workers' sandbox is in force."
        family = GaugeMetricFamily(EnvServerMetric.SANDBOX_LAYER, text, labels=["env", "layer"])
        for layer, is_in_force in layers.items():
            family.add_metric([self._name, layer], is_in_force)
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


def _wait_of(request: Request) -> float | None:
    """How long `?wait=` asks to wait; None where that is no bounded time."""
    given = request.query_params.get("wait", "0")
    try:
        wait_s = float(given)
    except ValueError:
        return None
    return wait_s if 0 <= wait_s <= MAX_DRAIN_WAIT_S else None


def _json(body: dict[str, object], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
