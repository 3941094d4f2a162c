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
"""Windows that are longer than the test, so that any two scrapes give a rate."""

TIMEOUT_S = 240.0
RULE_FILES = sorted((TARGET.parent / "rules").glob("*.yaml"))
QUEUE_WAIT_RECORD = "ludus:env_queue_wait_seconds:p95_rate5m"
HELD_ALERTS_QUERY = 'group by (alertname) (ALERTS{alertname=~"Ludus.+"})'
"""Query for the alerts whose conditions hold, including pending alerts."""

FAILURES = {"LudusCanaryFailed", "LudusLearnerRestarted"}
FAILURE_QUERIES = tuple(f'ALERTS{{alertname="{name}", alertstate="firing"}}' for name in FAILURES)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(sys.platform != "linux", reason="finds Prometheus' port in /proc"),
]


async def test_every_expression_has_data_and_only_failures_trigger_alerts(tmp_path: Path) -> None:
    kinds_by_expression = {
        fill_variables(query.expr, VARIABLE_VALUES): f"{board.uid}: {query.legend}"
        for board in DASHBOARDS
        for query in board.queries
        if query.empty_unless is None
    }
    kinds_by_expression |= {
        name: "record" for name in list_recording_rules() if name != QUEUE_WAIT_RECORD
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
                missing = await asyncio.to_thread(wait_for_data, address, kinds_by_expression)
                alerts_before_failures = await asyncio.to_thread(
                    wait_for_alerts, address, set(), len(targets)
                )
                report_failures(exporter)
                missing_failures = await asyncio.to_thread(
                    wait_for_data, address, dict.fromkeys(FAILURE_QUERIES, "")
                )
                alerts_after_failures = await asyncio.to_thread(
                    wait_for_alerts, address, FAILURES, len(targets)
                )
            stop_event.set()
    finally:
        exporter.close()
    assert not missing, "\n".join(f"{kind}: {expression}" for expression, kind in missing.items())
    assert alerts_before_failures == set()
    assert not missing_failures
    assert alerts_after_failures == FAILURES


def list_recording_rules() -> list[str]:
    """Return the names of the recording rules."""
    groups = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule["record"] for group in groups for rule in group["rules"] if "record" in rule]


def wait_for_alerts(address: str, expected: set[str], num_targets: int) -> set[str]:
    """Wait for the expected alerts while all targets respond; return the alerts that hold.

    A late response on a busy machine may cause an alert about a missing gateway.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        names = {
            series["metric"]["alertname"] for series in fetch_series(address, HELD_ALERTS_QUERY)
        }
        are_up = len(fetch_series(address, "up == 1")) == num_targets
        if (are_up and names == expected) or time.monotonic() > deadline_s:
            return names
        time.sleep(0.5)


def wait_for_data(address: str, kinds_by_expression: dict[str, str]) -> dict[str, str]:
    """Return the expressions that have no data after a generous wait."""
    deadline_s = time.monotonic() + TIMEOUT_S
    missing = kinds_by_expression
    while missing and time.monotonic() < deadline_s:
        time.sleep(1.0)
        missing = {
            expression: kind
            for expression, kind in missing.items()
            if not has_data(address, expression)
        }
    return missing


def has_data(address: str, expression: str) -> bool:
    """Return True if any series of the response has a number."""
    return any(series["value"][1] != "NaN" for series in fetch_series(address, expression))
