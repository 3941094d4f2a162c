"""A run through `ludus submit` and KubeRay, and its metrics in Prometheus and the dashboards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from dashboards import DASHBOARDS

from ludus.proto.runs import Summary
from tests.charts.promql import fill_variables
from tests.cluster.installed import CHART, TIMEOUT_S, find_skip_reason, install, wait_until
from tests.cluster.prometheus import has_data, has_prometheus, list_firing_alerts
from tests.cluster.training import ROLES, submit

MONITORING_SETTINGS = {
    "monitoring.monitors.enabled": "true",
    "monitoring.monitors.interval": "5s",
    "monitoring.rules.enabled": "true",
    "monitoring.dashboards.enabled": "true",
}
VARIABLE_VALUES = {"run": "demo", "environment": ".*", "window": "5m", "__rate_interval": "30s"}
DATA_TIMEOUT_S = 240.0

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]


@dataclass(frozen=True)
class ObservedRun:
    """The summary of a run and observations from the cluster during the run."""

    summary: Summary
    nodes: Mapping[str, str]
    """Name of the node of each role."""
    has_monitoring: bool
    missing_data: Mapping[str, str]
    """Dashboard expressions without data, each with its legend."""
    alerts: set[str]


@pytest.fixture(scope="module")
def observed_run(tmp_path_factory: pytest.TempPathFactory) -> ObservedRun:
    has_monitoring = has_prometheus()
    folder = tmp_path_factory.mktemp("run") / "results"
    with (
        install(
            [CHART / "values-cpu.yaml"], MONITORING_SETTINGS if has_monitoring else {}
        ) as release,
        submit(release, folder) as training,
    ):
        wait_until(
            lambda: set(training.find_pods()) == set(ROLES),
            "the head, learner and rollout pods",
            TIMEOUT_S,
        )
        nodes = {role: training.find_node(role) for role in ROLES}
        training.wait_for_steps(25)
        missing_data = find_missing_data(release.namespace) if has_monitoring else {}
        alerts = list_firing_alerts(release.namespace) if has_monitoring else set()
        summary = training.finish()
        alerts |= list_firing_alerts(release.namespace) if has_monitoring else set()
    return ObservedRun(summary, nodes, has_monitoring, missing_data, alerts)


def find_missing_data(namespace: str) -> Mapping[str, str]:
    """Wait until all dashboard expressions have data; return those without data at the timeout."""
    values = VARIABLE_VALUES | {"namespace": namespace}
    missing_data = {
        fill_variables(query.expr, values): f"{board.uid}: {query.legend}"
        for board in DASHBOARDS
        for query in board.queries
        if query.empty_unless is None
    }
    deadline = time.monotonic() + DATA_TIMEOUT_S
    while missing_data and time.monotonic() < deadline:
        missing_data = {
            expression: legend
            for expression, legend in missing_data.items()
            if not has_data(expression)
        }
        time.sleep(1)
    return missing_data


def test_submitted_run_learns_blackjack_on_several_nodes(observed_run: ObservedRun) -> None:
    assert observed_run.nodes["learner"] != observed_run.nodes["rollout"]
    assert observed_run.summary.gap_closed is not None and observed_run.summary.gap_closed >= 0.90
    assert (observed_run.summary.canary_failures, observed_run.summary.episodes_lost) == (0, 0)


def test_every_expression_of_every_dashboard_has_data_and_no_alert_fires(
    observed_run: ObservedRun,
) -> None:
    if not observed_run.has_monitoring:
        pytest.skip("SKIPPED, NOT PASSED: no Prometheus operator is installed")
    assert not observed_run.missing_data, "\n".join(
        f"{legend}: {expression}" for expression, legend in observed_run.missing_data.items()
    )
    assert observed_run.alerts == set()
