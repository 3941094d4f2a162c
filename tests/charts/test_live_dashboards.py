"""Where the platform really runs, every expression has data, and only what is wrong is told of."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
import yaml
from dashboards import DASHBOARDS, TARGET

from tests.charts.live import ask, fail, play, prometheus, started_exporter, train
from tests.charts.promql import filled_in
from tests.gateway.gateways import run_gateway

VALUES = {
    "namespace": "ludus|nothing",
    "run": "mixed",
    "environment": ".*",
    "window": "10m",
    "__rate_interval": "10m",
}
"""Windows longer than the test: two scrapes give a rate, however far apart they are."""

PATIENCE_S = 240.0
RULES = sorted((TARGET.parent / "rules").glob("*.yaml"))
UNLESS_OPENS_WAIT = "ludus:env_queue_wait_seconds:p95_rate5m"
IGNORED = 'group by (alertname) (ALERTS{alertname=~"Ludus.+"})'
"""Pending alerts, too: their conditions hold."""

FAILURES = {"LudusCanaryFailed", "LudusLearnerRestarted"}
FAILED = tuple(f'ALERTS{{alertname="{name}", alertstate="firing"}}' for name in FAILURES)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(sys.platform != "linux", reason="finds Prometheus' port in /proc"),
]


async def test_every_expression_has_data_and_alerts_tell_of_failures_alone(tmp_path: Path) -> None:
    wanted = {
        filled_in(query.expr, VALUES): f"{board.uid}: {query.legend}"
        for board in DASHBOARDS
        for query in board.queries
        if query.empty_unless is None
    }
    wanted |= {name: "record" for name in records() if name != UNLESS_OPENS_WAIT}
    exporter, end = started_exporter(), asyncio.Event()
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
                missing = await asyncio.to_thread(still_missing, address, wanted)
                told_of_nothing = await asyncio.to_thread(told, address, set(), len(targets))
                fail(exporter)
                unmet = await asyncio.to_thread(still_missing, address, dict.fromkeys(FAILED, ""))
                told_of_failures = await asyncio.to_thread(told, address, FAILURES, len(targets))
            end.set()
    finally:
        exporter.close()
    assert not missing, "\n".join(f"{what}: {expr}" for expr, what in missing.items())
    assert told_of_nothing == set()
    assert not unmet
    assert told_of_failures == FAILURES


def records() -> list[str]:
    """The names of the recording rules."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule["record"] for group in groups for rule in group["rules"] if "record" in rule]


def told(address: str, expected: set[str], num_targets: int) -> set[str]:
    """The alerts whose conditions hold, all targets answering: the expected ones, in time.

    A scrape that a busy machine answers too late may tell of a gateway that is missing.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        names = {series["metric"]["alertname"] for series in ask(address, IGNORED)}
        are_up = len(ask(address, "up == 1")) == num_targets
        if (are_up and names == expected) or time.monotonic() > deadline_s:
            return names
        time.sleep(0.5)


def still_missing(address: str, wanted: dict[str, str]) -> dict[str, str]:
    """The expressions without data, after everything had the time to appear."""
    deadline_s = time.monotonic() + PATIENCE_S
    missing = wanted
    while missing and time.monotonic() < deadline_s:
        time.sleep(1.0)
        missing = {expr: what for expr, what in missing.items() if not has_data(address, expr)}
    return missing


def has_data(address: str, expression: str) -> bool:
    """Whether any series of the answer is a number."""
    return any(series["value"][1] != "NaN" for series in ask(address, expression))
