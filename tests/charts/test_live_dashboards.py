"""Every expression has data on a running platform, and only real failures cause alerts."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
import yaml
from dashboards import DASHBOARDS, TARGET

from tests.charts.live import (
    fetch_series,
    play_sessions,
    report_failures,
    run_prometheus,
    start_exporter,
    write_training_rows,
)
from tests.charts.promql import fill_variables
from tests.gateway.gateways import run_gateway

VARIABLE_VALUES = {
    "namespace": "ludus|nothing",
    "run": "mixed",
    "environment": ".*",
    "window": "10m",
    "__rate_interval": "10m",
}
"""Values of the dashboards' variables. Every window is longer than the test."""

TIMEOUT_S = 240.0
RULE_FILES = sorted((TARGET.parent / "rules").glob("*.yaml"))
QUEUE_WAIT_RECORD = "ludus:env_queue_wait_seconds:p95_rate5m"
ACTIVE_ALERTS_QUERY = 'group by (alertname) (ALERTS{alertname=~"Ludus.+"})'
"""Query for the names of the pending and firing alerts."""

FAILURE_ALERTS = {"LudusCanaryFailed", "LudusLearnerRestarted"}
FAILURE_QUERIES = tuple(
    f'ALERTS{{alertname="{name}", alertstate="firing"}}' for name in FAILURE_ALERTS
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(sys.platform != "linux", reason="Prometheus' port is read from /proc"),
]


async def test_every_expression_has_data_and_only_failures_trigger_alerts(tmp_path: Path) -> None:
    sources_by_expression = {
        fill_variables(query.expr, VARIABLE_VALUES): f"{board.uid}: {query.legend}"
        for board in DASHBOARDS
        for query in board.queries
        if query.empty_unless is None
    }
    sources_by_expression |= {
        name: "recording rule" for name in list_recording_rules() if name != QUEUE_WAIT_RECORD
    }
    exporter, stop_event = start_exporter(), asyncio.Event()
    try:
        async with run_gateway() as (gateway, [server]), asyncio.TaskGroup() as tasks:
            tasks.create_task(play_sessions(gateway.grpc_address, stop_event))
            tasks.create_task(write_training_rows(exporter, stop_event))
            targets = {
                "gateway": gateway.http_address,
                "server": server.http_address,
                "driver": f"http://127.0.0.1:{exporter.port}",
            }
            with run_prometheus(tmp_path, targets, RULE_FILES) as address:
                sources_without_data = await asyncio.to_thread(
                    wait_for_data, address, sources_by_expression
                )
                alerts_before_failures = await asyncio.to_thread(
                    wait_for_alerts, address, set(), len(targets)
                )
                report_failures(exporter)
                unreported_failures = await asyncio.to_thread(
                    wait_for_data, address, dict.fromkeys(FAILURE_QUERIES, "")
                )
                alerts_after_failures = await asyncio.to_thread(
                    wait_for_alerts, address, FAILURE_ALERTS, len(targets)
                )
            stop_event.set()
    finally:
        exporter.close()
    assert not sources_without_data, "\n".join(
        f"{source} has no data: {expression}" for expression, source in sources_without_data.items()
    )
    assert alerts_before_failures == set()
    assert not unreported_failures
    assert alerts_after_failures == FAILURE_ALERTS


def list_recording_rules() -> list[str]:
    """Return the names of the recording rules."""
    groups = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule["record"] for group in groups for rule in group["rules"] if "record" in rule]


def wait_for_alerts(address: str, expected: set[str], num_targets: int) -> set[str]:
    """Wait until all targets are up and only the expected alerts are active; return the alerts.

    On a busy machine, a slow response may briefly cause an alert about a missing gateway.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        names = {
            series["metric"]["alertname"] for series in fetch_series(address, ACTIVE_ALERTS_QUERY)
        }
        are_targets_up = len(fetch_series(address, "up == 1")) == num_targets
        if (are_targets_up and names == expected) or time.monotonic() > deadline_s:
            return names
        time.sleep(0.5)


def wait_for_data(address: str, sources_by_expression: dict[str, str]) -> dict[str, str]:
    """Wait for data; return the expressions without data after the time limit."""
    deadline_s = time.monotonic() + TIMEOUT_S
    sources_without_data = sources_by_expression
    while sources_without_data and time.monotonic() < deadline_s:
        time.sleep(1.0)
        sources_without_data = {
            expression: source
            for expression, source in sources_without_data.items()
            if not has_data(address, expression)
        }
    return sources_without_data


def has_data(address: str, expression: str) -> bool:
    """Return True if any series of the response has a number."""
    return any(series["value"][1] != "NaN" for series in fetch_series(address, expression))
