"""Rules and dashboards come out of the chart as they lie in it."""

from __future__ import annotations

from dashboards import render_files

from tests.charts.rendering import rendered
from tests.charts.test_rules import GROUPS, RULES
from tests.charts.value_sets import GPU


def test_the_chart_hands_over_every_rule_unchanged() -> None:
    assert len(RULES) == 3
    assert rendered(GPU).one("PrometheusRule")["spec"]["groups"] == GROUPS


def test_the_chart_hands_over_every_dashboard_unchanged() -> None:
    maps = [one for one in rendered(GPU).of_kind("ConfigMap") if "-dashboard-" in _name(one)]
    assert all(one["metadata"]["labels"]["grafana_dashboard"] == "1" for one in maps)
    shown = {name: text for one in maps for name, text in one["data"].items()}
    assert {name: text.strip() for name, text in shown.items()} == {
        path.name: text.strip() for path, text in render_files().items()
    }


def test_environment_servers_are_labelled_with_what_the_release_calls_them() -> None:
    monitor = rendered(GPU).one("PodMonitor", "-environment")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    labels = {one["targetLabel"] for one in endpoint["relabelings"]}
    assert labels == {"release", "environment"}


def _name(found: dict[str, dict[str, str]]) -> str:
    return found["metadata"]["name"]
