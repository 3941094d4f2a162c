"""Network policies deny every flow that is not in the diagram of the docs."""

from __future__ import annotations

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.services.runs.manifest import get_pod_templates, make_manifests
from ludus.services.runs.platform import parse_release
from tests.charts.flows import (
    compute_allowed_flows,
    list_policies,
    may_connect,
    read_diagram_flows,
)
from tests.charts.rendering import ValueSet, render
from tests.charts.value_sets import ALL_SETS, FULL_SET

pytestmark = pytest.mark.slow
RESTRICTED_SETS = [
    value_set for value_set in ALL_SETS if value_set.all_values["networkPolicy"]["enabled"]
]
CUSTOM_RULE_SETS = {"network"}
"""Names of the value sets with rules that are not in the diagram."""


def test_allowed_flows_equal_the_diagram() -> None:
    assert compute_allowed_flows(render(FULL_SET)) == read_diagram_flows()


@pytest.mark.parametrize(
    "value_set",
    [value_set for value_set in RESTRICTED_SETS if value_set.name not in CUSTOM_RULE_SETS],
    ids=lambda value_set: value_set.name,
)
def test_no_value_set_allows_flows_outside_the_diagram(value_set: ValueSet) -> None:
    diagram_flows = read_diagram_flows()
    for endpoints, ports in compute_allowed_flows(render(value_set)).items():
        assert ports <= diagram_flows.get(endpoints, frozenset()), endpoints


def test_pods_of_a_run_reach_each_other_and_no_other_run() -> None:
    release = render(FULL_SET)
    config_map = next(
        resource
        for resource in release.list_kind("ConfigMap")
        if "ludus.dev/runs" in resource["metadata"]["labels"]
    )
    pods, policies = {}, [resource["spec"] for resource in release.list_kind("NetworkPolicy")]
    for run in ("first", "second"):
        environment = {"kind": "remote", "address": "grpc://ludus-gateway:18000/blackjack"}
        config = LanguageModelRun.model_validate({"name": run, "environment": environment})
        manifests = make_manifests(config, parse_release(config_map))
        assert manifests.network_policy is not None
        policies.append(manifests.network_policy["spec"])
        for index, pod_template in enumerate(get_pod_templates(manifests.job)):
            pods[run, index] = pod_template["metadata"]["labels"]
    shared_labels = {
        key: text
        for key, text in pods["first", 1].items()
        if key not in ("ludus.dev/network", "ludus.dev/run")
    }
    for (source_run, _), source_labels in pods.items():
        for (target_run, _), target_labels in pods.items():
            is_allowed = may_connect(policies, source_labels, target_labels)
            assert is_allowed is (source_run == target_run)
        assert not may_connect(policies, source_labels, shared_labels)
        assert not may_connect(policies, shared_labels, source_labels)
    # The pods of rayCluster, and those of an earlier ludus submit, share the release's policy.
    assert may_connect(policies, shared_labels, shared_labels)


@pytest.mark.parametrize("value_set", RESTRICTED_SETS, ids=lambda value_set: value_set.name)
def test_network_policies_deny_all_traffic_by_default_for_every_pod(value_set: ValueSet) -> None:
    release = render(value_set)
    for location, metadata, _ in release.iterate_pods():
        denied_directions = {
            direction
            for policy in list_policies(release, metadata["labels"])
            for direction in policy.get("policyTypes", ())
            if not policy.get("egress") and not policy.get("ingress")
        }
        assert denied_directions == {"Ingress", "Egress"}, location


def test_open_network_values_render_no_network_policy() -> None:
    release = render(next(value_set for value_set in ALL_SETS if value_set.name == "open-network"))
    assert release.list_kind("NetworkPolicy") == []
