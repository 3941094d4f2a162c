"""Rules for every release: the profile `restricted`, minimal rights, no secret in plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.charts.rendering import CHART, Object, Rendered, ValueSet, render, template
from tests.charts.value_sets import ALL, CPU, EVERYTHING, GPU

pytestmark = pytest.mark.slow
every_set = pytest.mark.parametrize("chosen", ALL, ids=lambda value_set: value_set.name)
VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
"""Volume kinds that `restricted` allows and the chart needs."""
RIGHTS = {
    ("discovery.k8s.io", "endpointslices"): {"list", "watch"},
    ("", "pods"): {"patch"},
    ("coordination.k8s.io", "leases"): {"get", "update"},
    ("extensions.agents.x-k8s.io", "sandboxclaims"): {"create", "delete", "list", "watch"},
    ("extensions.agents.x-k8s.io", "sandboxwarmpools"): {"get"},
}
SENSITIVE = re.compile(r"(TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY|KEY_ID)", re.IGNORECASE)
CLUSTER_WIDE = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "Namespace"}
LABELS = {
    f"app.kubernetes.io/{name}"
    for name in ("name", "instance", "component", "part-of", "version", "managed-by")
}


def containers(release: Rendered) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and specification of every container."""
    for location, _, spec in release.pods():
        for pod_container in (*spec.get("initContainers", ()), *spec["containers"]):
            yield f"{location} {pod_container['name']}", pod_container


@every_set
def test_pods_satisfy_the_restricted_profile(chosen: ValueSet) -> None:
    for location, _, spec in render(chosen).pods():
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & spec.keys(), location
        assert spec["securityContext"]["runAsNonRoot"] is True, location
        assert spec["securityContext"]["runAsUser"] > 0, location
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", location
        for volume in spec.get("volumes", ()):
            assert volume.keys() - {"name"} <= VOLUMES, location
    for location, pod_container in containers(render(chosen)):
        assert not [port for port in pod_container.get("ports", ()) if "hostPort" in port], location
        _is_restricted(location, pod_container["securityContext"])
    for cluster in ray_clusters(render(chosen)):
        if "autoscalerOptions" in cluster:
            _is_restricted("the autoscaler", cluster["autoscalerOptions"]["securityContext"])


def _is_restricted(location: str, context: dict[str, Any]) -> None:
    assert context["allowPrivilegeEscalation"] is False, location
    assert context["capabilities"] == {"drop": ["ALL"]}, location
    assert context["readOnlyRootFilesystem"] is True, location
    assert not context.get("privileged"), location


def ray_clusters(release: Rendered) -> list[dict[str, Any]]:
    """Return the specification of every Ray cluster."""
    alone = [item["spec"] for item in release.list_kind("RayCluster")]
    return [release.ray_job["spec"]["rayClusterSpec"], *alone]


@every_set
def test_roles_have_only_rights_that_are_used(chosen: ValueSet) -> None:
    release = render(chosen)
    for role in release.list_kind("Role"):
        for rule in role["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    assert set(rule["verbs"]) == RIGHTS[group, resource]
            if {"leases", "sandboxwarmpools"} & set(rule["resources"]):
                assert rule["resourceNames"]
            sandboxed = any(
                item.get("mode") == "sandbox" for item in chosen.all_values["environments"].values()
            )
            assert sandboxed or "extensions.agents.x-k8s.io" not in rule["apiGroups"]
    assert not [item for item in release.all_objects if item["kind"] in CLUSTER_WIDE]


@every_set
def test_only_clients_of_the_api_server_have_a_token(chosen: ValueSet) -> None:
    scaled = chosen.all_values["runs"]["autoscaling"]["enabled"]
    for location, metadata, spec in render(chosen).pods():
        is_gateway = metadata["labels"]["app.kubernetes.io/component"] == "gateway"
        is_scaler = scaled and metadata["labels"].get("ludus.dev/group") == "head"
        shows = spec.get("automountServiceAccountToken", True)
        assert shows == (is_gateway or is_scaler), location


@every_set
def test_no_secret_is_in_plain_text(chosen: ValueSet) -> None:
    release = render(chosen)
    assert release.list_kind("Secret") == []
    for location, pod_container in containers(release):
        for variable in pod_container.get("env", ()):
            if SENSITIVE.search(variable["name"]):
                assert variable.keys() == {"name", "valueFrom"}, f"{location} {variable['name']}"
                assert "secretKeyRef" in variable["valueFrom"]
        for argument in (*pod_container.get("command", ()), *pod_container.get("args", ())):
            assert not re.search(r"--?\w*(token|password|secret|key)\w*=", argument), location


@every_set
def test_objects_belong_to_the_release_alone(chosen: ValueSet) -> None:
    release = render(chosen)
    ends = [
        (resource["apiVersion"], resource["kind"], resource["metadata"]["name"])
        for resource in release.objects
    ]
    assert len(set(ends)) == len(ends)
    for resource in release.all_objects:
        metadata = resource["metadata"]
        assert metadata.get("namespace", chosen.namespace) == chosen.namespace
        assert metadata.get("namespace") is None or resource["kind"] == "RayJob"
        assert metadata["labels"].keys() >= LABELS
        assert len(metadata["name"]) <= 63


@every_set
def test_nothing_that_scales_has_a_number_of_replicas(chosen: ValueSet) -> None:
    release = render(chosen)
    scaled = {
        item["spec"]["scaleTargetRef"]["name"]
        for kind in ("HorizontalPodAutoscaler", "ScaledObject")
        for item in release.list_kind(kind)
    }
    for target_deployment in release.list_kind("Deployment"):
        assert ("replicas" in target_deployment["spec"]) == (
            target_deployment["metadata"]["name"] not in scaled
        )


@every_set
def test_every_container_has_probes_bounds_and_a_tag(chosen: ValueSet) -> None:
    release = render(chosen)
    for location, pod_container in containers(release):
        assert {"cpu", "memory"} <= pod_container["resources"]["requests"].keys(), location
        assert "memory" in pod_container["resources"]["limits"], location
        assert not pod_container["image"].endswith(":latest"), location
        assert (
            "@sha256:" in pod_container["image"] or ":" in pod_container["image"].rpartition("/")[2]
        ), location
    for deployment in release.list_kind("Deployment"):
        (main_container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= main_container.keys()
    guarded = [
        item["spec"]["selector"]["matchLabels"] for item in release.list_kind("PodDisruptionBudget")
    ]
    for deployment in release.list_kind("Deployment"):
        if deployment["metadata"]["labels"]["app.kubernetes.io/component"] != "store":
            assert guarded.count(deployment["spec"]["selector"]["matchLabels"]) == 1


@every_set
def test_services_and_budgets_select_one_set_of_pods(chosen: ValueSet) -> None:
    release = render(chosen)
    pods = {location: metadata["labels"] for location, metadata, _ in release.pods()}
    services = [item for item in release.list_kind("Service") if item["spec"].get("selector")]
    for service in services:
        selector_items = service["spec"]["selector"].items()
        assert (
            len([location for location, labels in pods.items() if selector_items <= labels.items()])
            == 1
        )


def test_templates_use_neither_random_values_nor_lookups() -> None:
    forbidden = re.compile(
        r"\b(lookup|rand\w+|uuidv4|genCA|gen\w+Cert|genPrivateKey|htpasswd|bcrypt|now|tpl) "
    )
    for path in (CHART / "templates").rglob("*.*"):
        code = " ".join(re.findall(r"{{-?(?!-? */\*)(.*?)-?}}", path.read_text(encoding="utf-8")))
        assert not forbidden.search(code), path


@pytest.mark.parametrize("chosen", [CPU, GPU, EVERYTHING], ids=lambda value_set: value_set.name)
def test_rendering_is_deterministic(chosen: ValueSet) -> None:
    assert template(chosen).stdout == render(chosen).text


def test_without_dashboards_a_release_is_small() -> None:
    """Helm stores a release in a Secret of at most 1 MiB."""
    assert len(json.dumps(render(EVERYTHING).objects)) < 200_000


def _resource_names(release: Rendered, kind: str) -> set[str]:
    return {item["metadata"]["name"] for item in release.list_kind(kind)}


@every_set
def test_mounted_objects_exist_or_are_configured(chosen: ValueSet) -> None:
    release, values = render(chosen), chosen.all_values
    claims = _resource_names(release, "PersistentVolumeClaim")
    claims |= {values["storage"]["runs"]["existingClaim"], values["runs"]["cache"]["existingClaim"]}
    secrets = {
        values["auth"]["existingSecret"],
        values["storage"]["s3"]["existingSecret"],
        values["gateway"]["tls"]["existingSecret"],
        values["gateway"]["tenants"]["existingSecret"],
    }
    maps = _resource_names(release, "ConfigMap") | {"RUN-config"}
    for location, _, spec in release.pods():
        assert set(_find_values(spec, "claimName")) <= claims - {""}, location
        assert set(_find_values(spec, "secretName")) <= secrets - {""}, location
        assert {item["name"] for item in _find_values(spec, "configMap")} <= maps, location
        assert {item["name"] for item in _find_values(spec, "secretKeyRef")} <= secrets - {""}, (
            location
        )
        volumes = {item["name"] for item in spec.get("volumes", ())}
        mounts = {
            item["name"] for container in spec["containers"] for item in container["volumeMounts"]
        }
        assert mounts == volumes, location


def _find_values(node: Object | list[Any] | Any, key: str) -> Iterator[Any]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from _find_values(value, key)
    elif isinstance(node, list):
        for item in node:
            yield from _find_values(item, key)
