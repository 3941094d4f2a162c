"""Network policies deny every flow that is not in the diagram of the docs."""

from __future__ import annotations

import pytest

from tests.charts.flows import compute_allowed_flows, list_policies, read_diagram_flows
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
