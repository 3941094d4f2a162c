"""Every expression has data on a running platform, and only real failures cause alerts."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
import yaml
from dashboards import DASHBOARDS, TARGET

from tests.charts.live import ask, fail, play, prometheus, start_exporter, train
from tests.charts.promql import fill_variables
from tests.gateway.gateways import run_gateway

VALUES = {
    "namespace": "ludus|nothing",
    "run": "mixed",
    "environment": ".*",
    "window": "10m",
    "__rate_interval": "10m",
}
"""Windows that are longer than the test, so that any two scrapes give a rate."""

PATIENCE_S = 240.0
RULES = sorted((TARGET.parent / "rules").glob("*.yaml"))
UNLESS_OPENS_WAIT = "ludus:env_queue_wait_seconds:p95_rate5m"
IGNORED = 'group by (alertname) (ALERTS{alertname=~"Ludus.+"})'
"""Query for the alerts whose conditions hold, including pending alerts."""

FAILURES = {"LudusCanaryFailed", "LudusLearnerRestarted"}
FAILED = tuple(f'ALERTS{{alertname="{name}", alertstate="firing"}}' for name in FAILURES)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(sys.platform != "linux", reason="finds Prometheus' port in /proc"),
]


async def test_every_expression_has_data_and_only_failures_cause_alerts(tmp_path: Path) -> None:
    kinds_by_expression = {
        fill_variables(query.expr, VALUES): f"{board.uid}: {query.legend}"
        for board in DASHBOARDS
        for query in board.queries
        if query.empty_unless is None
    }
    kinds_by_expression |= {
        name: "record" for name in recording_rule_names() if name != UNLESS_OPENS_WAIT
    }
    exporter, end = start_exporter(), asyncio.Event()
    try:
        async with run_gateway() as (gateway, [server]), asyncio.TaskGroup() as tasks:
            tasks.create_task(play(gateway.grpc_address, end))
            tasks.create_task(train(exporter, end))
            targets = {
                "gateway": gateway.http_address,
                "server": server.http_address,
                "driver": f"http://127.0.0.1:{exporter.port}",
            }
            with prometheus(tmp_path, targets, RULES) as address:
                missing = await asyncio.to_thread(still_missing, address, kinds_by_expression)
                alerts_before_failures = await asyncio.to_thread(
                    wait_for_alerts, address, set(), len(targets)
                )
                fail(exporter)
                unmet = await asyncio.to_thread(still_missing, address, dict.fromkeys(FAILED, ""))
                alerts_after_failures = await asyncio.to_thread(
                    wait_for_alerts, address, FAILURES, len(targets)
                )
            end.set()
    finally:
        exporter.close()
    assert not missing, "\n".join(f"{kind}: {expr}" for expr, kind in missing.items())
    assert alerts_before_failures == set()
    assert not unmet
    assert alerts_after_failures == FAILURES


def recording_rule_names() -> list[str]:
    """Return the names of the recording rules."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule["record"] for group in groups for rule in group["rules"] if "record" in rule]


def wait_for_alerts(address: str, expected: set[str], num_targets: int) -> set[str]:
    """Wait for the expected alerts while all targets respond; return the alerts that hold.

    A late response on a busy machine may cause an alert about a missing gateway.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        names = {series["metric"]["alertname"] for series in ask(address, IGNORED)}
        are_up = len(ask(address, "up == 1")) == num_targets
        if (are_up and names == expected) or time.monotonic() > deadline_s:
            return names
        time.sleep(0.5)


def still_missing(address: str, kinds_by_expression: dict[str, str]) -> dict[str, str]:
    """Return the expressions that have no data after a generous wait."""
    deadline_s = time.monotonic() + PATIENCE_S
    missing = kinds_by_expression
    while missing and time.monotonic() < deadline_s:
        time.sleep(1.0)
        missing = {expr: kind for expr, kind in missing.items() if not has_data(address, expr)}
    return missing


def has_data(address: str, expression: str) -> bool:
    """Return True if any series of the response has a number."""
    return any(series["value"][1] != "NaN" for series in ask(address, expression))
