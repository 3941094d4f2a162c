"""A run through `ludus submit` and KubeRay, and what Prometheus and every dashboard know of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from dashboards import DASHBOARDS

from ludus.proto.runs import Summary
from tests.charts.promql import fill_variables
from tests.cluster.installed import CHART, TIMEOUT_S, installed, until, why_not
from tests.cluster.prometheus import firing, has_data, is_there
from tests.cluster.training import ROLES, submitted

MONITORING = {
    "monitoring.monitors.enabled": "true",
    "monitoring.monitors.interval": "5s",
    "monitoring.rules.enabled": "true",
    "monitoring.dashboards.enabled": "true",
}
VALUES = {"run": "demo", "environment": ".*", "window": "5m", "__rate_interval": "30s"}
PATIENCE_S = 240.0

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@dataclass(frozen=True)
class Seen:
    """What was seen of a run."""

    summary: Summary
    nodes: Mapping[str, str]
    """By role."""
    has_monitoring: bool
    silent: Mapping[str, str]
    """Expressions of dashboards that had no data, and what they show."""
    alerts: set[str]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    has_monitoring = is_there()
    folder = tmp_path_factory.mktemp("run") / "results"
    with (
        installed([CHART / "values-cpu.yaml"], MONITORING if has_monitoring else {}) as release,
        submitted(release, folder) as training,
    ):
        until(lambda: set(training.pods()) == set(ROLES), "head, learner, rollout", TIMEOUT_S)
        nodes = {role: training.node_of(role) for role in ROLES}
        training.go_on(25)
        silent = silent_expressions(release.namespace) if has_monitoring else {}
        alerts = firing(release.namespace) if has_monitoring else set()
        summary = training.finish()
        alerts |= firing(release.namespace) if has_monitoring else set()
    return Seen(summary, nodes, has_monitoring, silent, alerts)


def silent_expressions(namespace: str) -> Mapping[str, str]:
    """What still has no data when patience ends."""
    values = VALUES | {"namespace": namespace}
    silent = {
        fill_variables(query.expr, values): f"{board.uid}: {query.legend}"
        for board in DASHBOARDS
        for query in board.queries
        if query.empty_unless is None
    }
    deadline = time.monotonic() + PATIENCE_S
    while silent and time.monotonic() < deadline:
        silent = {expr: what for expr, what in silent.items() if not has_data(expr)}
        time.sleep(1)
    return silent


def test_a_submitted_run_learns_blackjack_on_several_nodes(seen: Seen) -> None:
    assert seen.nodes["learner"] != seen.nodes["rollout"]
    assert seen.summary.gap_closed is not None and seen.summary.gap_closed >= 0.90
    assert (seen.summary.canary_failures, seen.summary.episodes_lost) == (0, 0)


def test_every_expression_of_every_dashboard_has_data_and_no_alert_fires(seen: Seen) -> None:
    if not seen.has_monitoring:
        pytest.skip("SKIPPED, NOT PASSED: no Prometheus operator is installed")
    assert not seen.silent, "\n".join(f"{what}: {expr}" for expr, what in seen.silent.items())
    assert seen.alerts == set()
