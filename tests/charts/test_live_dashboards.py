"""Every expression has data where the platform really runs: a metric that is renamed shows."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
from dashboards import DASHBOARDS

from tests.charts.live import ask, play, prometheus, started_exporter, train
from tests.charts.promql import filled_in
from tests.gateway.gateways import served

VALUES = {
    "namespace": "ludus|nothing",
    "run": "mixed",
    "environment": ".*",
    "window": "5s",
    "__rate_interval": "3s",
}
PATIENCE_S = 40.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds Prometheus' port in /proc"),
]


async def test_every_expression_has_data(tmp_path: Path) -> None:
    wanted = {
        filled_in(query.expr, VALUES): f"{board.uid}: {query.legend}"
        for board in DASHBOARDS
        for query in board.queries
        if query.empty_unless is None
    }
    exporter, end = started_exporter(), asyncio.Event()
    try:
        async with served() as (gateway, [server]), asyncio.TaskGroup() as tasks:
            tasks.create_task(play(gateway.grpc_address, end))
            tasks.create_task(train(exporter, end))
            targets = {
                "gateway": gateway.http_address,
                "server": server.http_address,
                "driver": f"http://127.0.0.1:{exporter.port}",
            }
            with prometheus(tmp_path, targets) as address:
                missing = await asyncio.to_thread(still_missing, address, wanted)
            end.set()
    finally:
        exporter.close()
    assert not missing, "\n".join(f"{what}: {expr}" for expr, what in missing.items())


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
