"""Write docs/fleet-metrics.md from the metrics of servers and gateways, or check it."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from generated_page import escape_cell, make_table, write_or_check_page
from prometheus_client import Metric

from ludus.env.http.health import SessionCollector
from ludus.env.sandbox.confine import Layer
from ludus.env.sessions.interface import Load, SessionCounts, WorkerCounts
from ludus.services.gateway.tenancy.metrics import GatewayMetrics

INTRODUCTION = """# Metrics of servers and gateways

Environment servers and gateways serve `/metrics` in the formats of Prometheus and OpenMetrics, on \
the port for HTTP and on the admin port. On the port for HTTP, a program with tokens requires one \
(a gateway: with the scope `step`). [security.md](security.md#metrics) has examples of queries, \
[dashboards.md](dashboards.md) describes the dashboards and alerts, and [metrics.md](metrics.md) \
lists the metrics of a run.

The label `env` is the name of an environment: in a gateway that of its configuration, in a server \
that of the environment itself. A counter has the suffix `_total`. A histogram has the suffixes \
`_bucket`, `_sum` and `_count`, and the label `le`. Every series exists from the start. Labels \
have the listed values only, and never contain a session, a tenant or a token.

This page is generated: `.venv/bin/python dev/fleet_metrics_docs.py`.
"""
_GATEWAY_TEXT = """
Every gateway of a release reports the same capacity, servers and sessions, except sessions with
`state="pending"`. Take the maximum of these metrics over the gateways, and the sum of the others.
"""
_SERVER_TEXT = """
The last three metrics exist with isolation `pool` and `process` only.
"""
_TYPE_NAMES = {"info": "gauge"}
_SUFFIXES = {"counter": "_total", "info": "_info"}


def make_page() -> str:
    """Return the text of the page."""
    gateway_metrics = GatewayMetrics(["blackjack"]).collect()
    server_metrics = SessionCollector(_make_sessions()).collect()
    return (
        f"{INTRODUCTION}\n## Gateway\n{_GATEWAY_TEXT}\n{_make_metric_table(gateway_metrics)}"
        f"\n## Environment server\n{_SERVER_TEXT}\n{_make_metric_table(server_metrics)}"
    )


def _make_sessions() -> Any:
    """Return an object with the attributes of `Sessions` that a collector reads."""
    return SimpleNamespace(
        description=SimpleNamespace(name="blackjack"),
        load=Load(0, 1),
        counts=SessionCounts(),
        worker_counts=WorkerCounts(0, 0, dict.fromkeys(Layer, True)),
    )


def _make_metric_table(metrics: Iterable[Metric]) -> str:
    rows = []
    for metric in metrics:
        values_by_label: dict[str, dict[str, None]] = {}
        for sample in metric.samples:
            for label, value in sample.labels.items():
                if label != "le":
                    values_by_label.setdefault(label, {})[value] = None
        name = f"`{metric.name}{_SUFFIXES.get(metric.type, '')}`"
        labels = "; ".join(_describe_label(*item) for item in values_by_label.items())
        type_name = _TYPE_NAMES.get(metric.type, metric.type)
        rows.append((name, type_name, labels, escape_cell(metric.documentation)))
    return make_table(("metric", "type", "labels", "description"), *rows)


def _describe_label(label: str, values: Iterable[str]) -> str:
    if label in ("env", "version", "python"):
        return f"`{label}`"
    return f"`{label}`: {', '.join(values)}"


if __name__ == "__main__":
    write_or_check_page("fleet-metrics.md", make_page())
