"""Names of the metrics that the code exports to Prometheus, read from real scrapes."""

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
from ludus.env.sessions.options import ServerOptions
from ludus.proto.metrics import EnvServerMetric
from ludus.services.gateway.tenancy.metrics import GatewayMetrics
from ludus.trainer.run.prometheus import RunSeries
from tests.env.counting_env import CountingEnv
from tests.sinks.mixed_run import make_run_config

PROMETHEUS_NAMES = {"up", "ALERTS"}
"""Series that Prometheus itself creates."""
KUBERAY_NAMES = {"kuberay_job_deployment_status"}
"""Series of the KubeRay operator, version 1.4 and later."""
WORKER_PROCESS_NAMES = {EnvServerMetric.WORKERS, f"{EnvServerMetric.WORKER_ENDS}_total"}
"""Series that exist only if sessions run in worker processes (see tests/env/test_health.py)."""
_RAY_GAUGE = re.compile(r'^    "(\w+)": Gauge\(', re.MULTILINE)


@functools.cache
def list_exported_names() -> frozenset[str]:
    """Return the name of every series that a dashboard or a rule may use."""
    ludus_names = (
        _read_gateway_names()
        | _read_run_names()
        | asyncio.run(_read_server_names())
        | WORKER_PROCESS_NAMES
    )
    return frozenset(ludus_names | PROMETHEUS_NAMES | KUBERAY_NAMES | _read_ray_names())


def _read_gateway_names() -> set[str]:
    body, _ = asyncio.run(GatewayMetrics(["counting"]).render())
    return _list_series_names(text_string_to_metric_families(body.decode()))


def _read_run_names() -> set[str]:
    series = RunSeries(make_run_config())
    return _list_series_names(series.collect())


async def _read_server_names() -> set[str]:
    app = build_admin_app(SessionCore(make_local_host(CountingEnv), ServerOptions()))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/metrics")
    return _list_series_names(text_string_to_metric_families(response.text))


def _list_series_names(families: Iterable[Metric]) -> set[str]:
    """Return the names of the series of each family, including series without samples."""
    names: set[str] = set()
    for family in families:
        suffixes = {
            "counter": ("_total",),
            "info": ("_info",),
            "histogram": ("_bucket", "_sum", "_count"),
        }.get(family.type, ("",))
        # The plain text format reports an info metric as a gauge whose name keeps the suffix.
        names |= {family.name.removesuffix("_info") + suffix for suffix in suffixes}
        names |= {sample.name for sample in family.samples}
    return names


def _read_ray_names() -> set[str]:
    """Return the names of the node gauges that Ray's source code declares."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None
    reporter_path = Path(spec.origin).parent / "dashboard/modules/reporter/reporter_agent.py"
    gauges = _RAY_GAUGE.findall(reporter_path.read_text(encoding="utf-8"))
    return {f"ray_{name}" for name in gauges}
