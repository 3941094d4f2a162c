"""The policy of a release lets its gateways change one annotation of its environments' pods."""

from __future__ import annotations

import copy
from typing import Any

import celpy
import pytest
from celpy.adapter import json_to_cel

from tests.charts.rendering import RenderedRelease, ValueSet, merge_values, render
from tests.charts.value_sets import ALL_SETS

pytestmark = pytest.mark.slow

COST = "controller.kubernetes.io/pod-deletion-cost"
BASE = next(value_set for value_set in ALL_SETS if value_set.name == "keda-from-one")


def evaluate(expression: str, values: dict[str, Any]) -> Any:
    """Evaluate a CEL expression."""
    environment = celpy.Environment()
    program = environment.program(environment.compile(expression))
    return program.evaluate({name: json_to_cel(value) for name, value in values.items()})


def is_admitted(release: RenderedRelease, user: str, old_pod: Any, new_pod: Any) -> bool:
    """Return True if the release's policy admits a change of a pod."""
    spec = release.find("ValidatingAdmissionPolicy")["spec"]
    values = {"object": new_pod, "oldObject": old_pod, "request": {"userInfo": {"username": user}}}
    if not all(evaluate(item["expression"], values) for item in spec["matchConditions"]):
        return True  # the policy does not apply
    values["variables"] = {
        item["name"]: _to_json(evaluate(item["expression"], values)) for item in spec["variables"]
    }
    return all(evaluate(item["expression"], values) for item in spec["validations"])


def _to_json(value: Any) -> Any:
    return {str(key): str(text) for key, text in value.items()}


def make_pod(release: RenderedRelease, component: str = "environment") -> dict[str, Any]:
    """Return a pod of the release."""
    for _, metadata, spec in release.iterate_pods():
        if metadata["labels"]["app.kubernetes.io/component"] == component:
            return {"metadata": {"name": "pod", **copy.deepcopy(metadata)}, "spec": spec}
    raise AssertionError(component)


def gateway_user(release: RenderedRelease) -> str:
    """Return the user name of the gateway's service account."""
    account = release.find("ServiceAccount", "-gateway")["metadata"]["name"]
    return f"system:serviceaccount:{release.value_set.namespace}:{account}"


def add_annotation(pod: dict[str, Any], key: str, text: str = "25") -> dict[str, Any]:
    """Return a copy of the pod with an annotation."""
    annotations = {**pod["metadata"].get("annotations", {}), key: text}
    return {**pod, "metadata": {**pod["metadata"], "annotations": annotations}}


def test_gateways_may_set_the_deletion_cost_of_environment_pods() -> None:
    release = render(BASE)
    pod = make_pod(release)
    assert is_admitted(release, gateway_user(release), pod, add_annotation(pod, COST))
    pod["metadata"].pop("annotations", None)
    marked_pod = add_annotation(pod, COST)
    assert is_admitted(release, gateway_user(release), pod, marked_pod)
    assert is_admitted(release, gateway_user(release), marked_pod, add_annotation(pod, COST, "50"))


@pytest.mark.parametrize("component", ["gateway", "head"])
def test_gateways_may_not_change_other_pods(component: str) -> None:
    release = render(BASE)
    pod = make_pod(release, "gateway") if component == "gateway" else make_pod(release, "trainer")
    assert not is_admitted(release, gateway_user(release), pod, add_annotation(pod, COST))
    foreign_pod = copy.deepcopy(make_pod(release))
    foreign_pod["metadata"]["labels"]["app.kubernetes.io/instance"] = "another"
    changed_pod = add_annotation(foreign_pod, COST)
    assert not is_admitted(release, gateway_user(release), foreign_pod, changed_pod)
    bare_pod = {"metadata": {"name": "pod"}, "spec": {}}
    changed_pod = add_annotation(bare_pod, COST)
    assert not is_admitted(release, gateway_user(release), bare_pod, changed_pod)


def test_gateways_may_not_change_other_fields() -> None:
    release = render(BASE)
    pod = make_pod(release)
    user = gateway_user(release)
    metadata = pod["metadata"]
    first_container = {**pod["spec"]["containers"][0], "image": "attack"}
    labels = {**metadata["labels"], "extra": "label"}
    owner = {"name": "another", "uid": "1"}
    changed_pods = [
        {**pod, "spec": {**pod["spec"], "containers": [first_container]}},
        {**pod, "metadata": {**metadata, "labels": labels}},
        {**pod, "metadata": {**metadata, "labels": {}}},
        {**pod, "metadata": {**metadata, "ownerReferences": [owner]}},
        {**pod, "metadata": {**metadata, "finalizers": ["stay"]}},
        add_annotation(pod, "example/other"),
        add_annotation(pod, "cluster-autoscaler.kubernetes.io/safe-to-evict", "false"),
        {**pod, "metadata": {**metadata, "annotations": {COST: "25"}}},
    ]
    for changed_pod in changed_pods:
        assert not is_admitted(release, user, pod, changed_pod), changed_pod
        assert is_admitted(release, "a-controller", pod, changed_pod)


def test_policies_of_equal_releases_in_two_namespaces_have_different_names() -> None:
    other_set = ValueSet("elsewhere", BASE.values, BASE.file, namespace="elsewhere")
    releases = [render(BASE), render(other_set)]
    names = {item.find("ValidatingAdmissionPolicy")["metadata"]["name"] for item in releases}
    assert len(names) == 2
    for release in releases:
        policy, binding = (
            release.find(kind)
            for kind in ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
        )
        assert binding["spec"]["policyName"] == policy["metadata"]["name"]
        assert binding["spec"]["validationActions"] == ["Deny"]
        assert policy["spec"]["failurePolicy"] == "Fail"
        selector = policy["spec"]["matchConstraints"]["namespaceSelector"]["matchLabels"]
        assert selector == {"kubernetes.io/metadata.name": release.value_set.namespace}


@pytest.mark.parametrize("reason", ["no autoscaling", "disabled"])
def test_gateways_may_not_patch_pods_without_deletion_costs(reason: str) -> None:
    changes = (
        {"gateway": {"deletionCosts": False}}
        if reason == "disabled"
        else {"environmentDefaults": {}, "environments": _without_autoscaling()}
    )
    value_set = ValueSet(reason, merge_values(BASE.values, changes), BASE.file)
    release = render(value_set)
    resources = [item for rule in release.find("Role")["rules"] for item in rule["resources"]]
    assert "pods" not in resources
    assert "leases" not in resources
    assert not release.list_kind("Lease")
    assert not release.list_kind("ValidatingAdmissionPolicy")


def _without_autoscaling() -> dict[str, Any]:
    return {name: {"autoscaling": {"kind": "none"}} for name in BASE.values["environments"]}
