"""Monitors, rules and dashboards, through the real Prometheus operator."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from dashboards import DASHBOARDS

from tests.charts.promql import filled_in
from tests.cluster.installed import CHART, installed, why_not
from tests.cluster.prometheus import firing, has_data, is_there
from tests.cluster.training import submitted

SETTINGS = {
    "monitoring.monitors.enabled": "true",
    "monitoring.monitors.interval": "5s",
    "monitoring.rules.enabled": "true",
    "monitoring.dashboards.enabled": "true",
}
RUN = ("training.groups_per_step=64", "eval.num_games=200", "eval.num_games_during=200")
VALUES = {"run": "demo", "environment": ".*", "window": "5m", "__rate_interval": "30s"}
PATIENCE_S = 240.0

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def test_every_expression_of_every_dashboard_has_data_and_no_alert_fires(tmp_path: Path) -> None:
    if not is_there():
        pytest.skip("SKIPPED, NOT PASSED: no Prometheus operator is installed")
    with (
        installed([CHART / "values-cpu.yaml"], SETTINGS) as release,
        submitted(release, tmp_path / "results", *RUN) as training,
    ):
        training.go_on(25)
        values = VALUES | {"namespace": release.namespace}
        missing = {
            filled_in(query.expr, values): f"{board.uid}: {query.legend}"
            for board in DASHBOARDS
            for query in board.queries
            if query.empty_unless is None
        }
        deadline = time.monotonic() + PATIENCE_S
        while missing and time.monotonic() < deadline:
            missing = {expr: what for expr, what in missing.items() if not has_data(expr)}
            time.sleep(1)
        told = firing(release.namespace)
        training.finish()
        told |= firing(release.namespace)
    assert not missing, "\n".join(f"{what}: {expr}" for expr, what in missing.items())
    assert told == set()
