"""The chart renders its rules and dashboards unchanged."""

from __future__ import annotations

import re

import pytest
import yaml
from dashboards import render_files

from tests.charts.rendering import CHART, ROOT, ValueSet, render
from tests.charts.test_rules import RULE_FILES, RULE_GROUPS
from tests.charts.value_sets import CPU_SET, GPU_SET

MONITORING_SET = ValueSet(
    "values-monitoring",
    yaml.safe_load((CHART / "values-monitoring.yaml").read_text(encoding="utf-8")),
    file=CPU_SET.file,
)


@pytest.mark.slow
def test_every_rule_is_rendered_unchanged() -> None:
    assert len(RULE_FILES) == 3
    assert render(GPU_SET).find("PrometheusRule")["spec"]["groups"] == RULE_GROUPS


@pytest.mark.slow
def test_every_dashboard_is_rendered_unchanged() -> None:
    config_maps = [
        resource
        for resource in render(GPU_SET).list_kind("ConfigMap")
        if "-dashboard-" in _read_name(resource)
    ]
    assert all(
        resource["metadata"]["labels"]["grafana_dashboard"] == "1" for resource in config_maps
    )
    dashboards = {name: text for resource in config_maps for name, text in resource["data"].items()}
    assert {name: text.strip() for name, text in dashboards.items()} == {
        path.name: text.strip() for path, text in render_files().items()
    }


@pytest.mark.slow
def test_values_for_the_quickstart_stack_match_its_release() -> None:
    page = (ROOT / "docs/kubernetes-quickstart.md").read_text(encoding="utf-8")
    match = re.search(r"helm install (\S+) kube-prometheus-stack .*--namespace (\S+)", page)
    assert match, "the quickstart installs no kube-prometheus-stack"
    release, namespace = match.groups()
    rendered = render(MONITORING_SET)
    for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule"):
        # The stack's Prometheus selects resources by the name of its release.
        labels = [resource["metadata"]["labels"] for resource in rendered.list_kind(kind)]
        assert labels and {label["release"] for label in labels} == {release}
    peers = MONITORING_SET.all_values["networkPolicy"]["prometheus"]
    assert [peer["namespaceSelector"]["matchLabels"] for peer in peers] == [
        {"kubernetes.io/metadata.name": namespace}
    ]


@pytest.mark.slow
def test_environment_server_metrics_have_release_and_environment_labels() -> None:
    monitor = render(GPU_SET).find("PodMonitor", "-environment")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    labels = {rule["targetLabel"] for rule in endpoint["relabelings"]}
    assert labels == {"release", "environment"}


def _read_name(resource: dict[str, dict[str, str]]) -> str:
    return resource["metadata"]["name"]
