"""The chart renders its rules and dashboards unchanged."""

from __future__ import annotations

from dashboards import render_files

from tests.charts.rendering import render
from tests.charts.test_rules import GROUPS, RULES
from tests.charts.value_sets import GPU


def test_every_rule_is_rendered_unchanged() -> None:
    assert len(RULES) == 3
    assert render(GPU).find("PrometheusRule")["spec"]["groups"] == GROUPS


def test_every_dashboard_is_rendered_unchanged() -> None:
    maps = [
        resource
        for resource in render(GPU).list_kind("ConfigMap")
        if "-dashboard-" in _name(resource)
    ]
    assert all(resource["metadata"]["labels"]["grafana_dashboard"] == "1" for resource in maps)
    dashboards = {name: text for resource in maps for name, text in resource["data"].items()}
    assert {name: text.strip() for name, text in dashboards.items()} == {
        path.name: text.strip() for path, text in render_files().items()
    }


def test_environment_servers_have_their_release_name_as_a_label() -> None:
    monitor = render(GPU).find("PodMonitor", "-environment")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    labels = {rule["targetLabel"] for rule in endpoint["relabelings"]}
    assert labels == {"release", "environment"}


def _name(resource: dict[str, dict[str, str]]) -> str:
    return resource["metadata"]["name"]
