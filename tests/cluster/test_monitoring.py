"""Monitors, rules and dashboards, through the real Prometheus operator.

LUDUS_PROMETHEUS is the address of its Prometheus in the cluster; the chart's own default is taken
where it is not set.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import yaml
from dashboards import DASHBOARDS

from tests.charts.promql import filled_in
from tests.cluster.installed import CHART, installed, kubectl, why_not
from tests.cluster.training import submitted

MONITORS = "podmonitors.monitoring.coreos.com"
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
    if MONITORS not in kubectl("get", "crd", "-o", "name"):
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


def firing(namespace: str) -> set[str]:
    """The alerts of a namespace that are firing."""
    found = ask(f'ALERTS{{alertname=~"Ludus.+",namespace="{namespace}",alertstate="firing"}}')
    return {series["metric"]["alertname"] for series in found}


def has_data(expression: str) -> bool:
    """Whether any series of the answer is a number."""
    return any(series["value"][1] != "NaN" for series in ask(expression))


def ask(query: str) -> list[dict[str, Any]]:
    """The series of Prometheus' answer, asked through the API server."""
    default = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["prometheusAddress"]
    address = urlsplit(os.environ.get("LUDUS_PROMETHEUS", default))
    service, namespace = str(address.hostname).split(".")[:2]
    place = f"/api/v1/namespaces/{namespace}/services/{service}:{address.port or 80}/proxy"
    said = kubectl("get", "--raw", f"{place}/api/v1/query?query={quote(query, safe='')}")
    result: list[dict[str, Any]] = json.loads(said)["data"]["result"]
    return result
