"""What the code exports to Prometheus, read from what it really answers to a scrape."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

import httpx
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ludus.env.http.health import build_admin_app
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import make_local_host
from ludus.env.sessions.options import CoreOptions
from ludus.proto.metrics import EnvServerMetric
from ludus.services.gateway.tenancy.metrics import GatewayMetrics
from ludus.trainer.run.sinks.prometheus import RunSeries
from tests.env.counting_env import CountingEnv
from tests.sinks.mixed_run import run_config

OF_PROMETHEUS = {"up", "ALERTS"}
"""Made by Prometheus itself."""
OF_KUBERAY = {"kuberay_job_deployment_status"}
"""Of KubeRay's operator, 1.4 and newer."""
OF_WORKER_PROCESSES = {EnvServerMetric.WORKERS, f"{EnvServerMetric.WORKER_ENDS}_total"}
"""Exported where sessions run in processes of their own; tests/env/test_health.py starts some."""
_RAY_GAUGE = re.compile(r'^    "(\w+)": Gauge\(', re.MULTILINE)


@functools.cache
def exported_names() -> frozenset[str]:
    """Every name of a series that a dashboard or a rule may read."""
    ours = _of_gateway() | _of_run() | asyncio.run(_of_server()) | OF_WORKER_PROCESSES
    return frozenset(ours | OF_PROMETHEUS | OF_KUBERAY | _of_ray())


def _of_gateway() -> set[str]:
    body, _ = asyncio.run(GatewayMetrics(["counting"]).render())
    return _names(text_string_to_metric_families(body.decode()))


def _of_run() -> set[str]:
    series = RunSeries(run_config())
    return _names(series.collect())


async def _of_server() -> set[str]:
    app = build_admin_app(SessionCore(make_local_host(CountingEnv), CoreOptions()))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.get("/metrics")
    return _names(text_string_to_metric_families(reply.text))


def _names(families: Iterable[Metric]) -> set[str]:
    """Of the series of each family, measured or not."""
    names: set[str] = set()
    for family in families:
        suffixes = {
            "counter": ("_total",),
            "info": ("_info",),
            "histogram": ("_bucket", "_sum", "_count"),
        }.get(family.type, ("",))
        # The plain format calls an info a gauge, and leaves its suffix in the name.
        names |= {family.name.removesuffix("_info") + suffix for suffix in suffixes}
        names |= {sample.name for sample in family.samples}
    return names


def _of_ray() -> set[str]:
    """The gauges of a Ray node, as Ray's source declares them."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None
    reporter = Path(spec.origin).parent / "dashboard/modules/reporter/reporter_agent.py"
    found = _RAY_GAUGE.findall(reporter.read_text(encoding="utf-8"))
    return {f"ray_{name}" for name in found}
