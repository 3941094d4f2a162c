"""The network denies everything but what the docs draw."""

from __future__ import annotations

import pytest

from tests.charts.flows import allowed, drawn, policies_of
from tests.charts.rendering import ValueSet, rendered
from tests.charts.value_sets import ALL, EVERYTHING

pytestmark = pytest.mark.slow
CLOSED = [one for one in ALL if one.all_values["networkPolicy"]["enabled"]]
OF_ONES_OWN = {"network"}
"""Sets with rules of their own beside the drawn ones."""


def test_the_flows_are_those_of_the_diagram() -> None:
    assert allowed(rendered(EVERYTHING)) == drawn()


@pytest.mark.parametrize(
    "chosen", [one for one in CLOSED if one.name not in OF_ONES_OWN], ids=lambda one: one.name
)
def test_no_values_open_more_than_the_diagram_draws(chosen: ValueSet) -> None:
    everything = drawn()
    for ends, ports in allowed(rendered(chosen)).items():
        assert ports <= everything.get(ends, frozenset()), ends


@pytest.mark.parametrize("chosen", CLOSED, ids=lambda one: one.name)
def test_every_pod_is_denied_what_nothing_allows(chosen: ValueSet) -> None:
    release = rendered(chosen)
    for place, metadata, _ in release.pods():
        closed = {
            direction
            for policy in policies_of(release, metadata["labels"])
            for direction in policy.get("policyTypes", ())
            if not policy.get("egress") and not policy.get("ingress")
        }
        assert closed == {"Ingress", "Egress"}, place


def test_the_network_is_open_where_that_was_asked_for() -> None:
    release = rendered(next(one for one in ALL if one.name == "open-network"))
    assert release.of_kind("NetworkPolicy") == []
