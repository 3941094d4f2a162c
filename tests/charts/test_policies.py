"""Security of every release: `restricted` profile, few permissions, no secret in plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.charts.rendering import CHART, Object, RenderedRelease, ValueSet, render, template
from tests.charts.value_sets import ALL_SETS, CPU_SET, FULL_SET, GPU_SET

pytestmark = pytest.mark.slow
parametrize_value_sets = pytest.mark.parametrize(
    "value_set", ALL_SETS, ids=lambda value_set: value_set.name
)
VOLUME_KINDS = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
"""Volume kinds that the `restricted` profile allows and the chart needs."""
ALLOWED_VERBS = {
    ("discovery.k8s.io", "endpointslices"): {"list", "watch"},
    ("", "pods"): {"patch"},
    ("coordination.k8s.io", "leases"): {"get", "update"},
    ("extensions.agents.x-k8s.io", "sandboxclaims"): {"create", "delete", "list", "watch"},
    ("extensions.agents.x-k8s.io", "sandboxwarmpools"): {"get"},
}
FLEET_KEYS = {"session-key", "environment-token"}
"""Keys of the Secret that give access to every environment server of a release."""
SENSITIVE_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY|KEY_ID)", re.IGNORECASE)
CLUSTER_WIDE_KINDS = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "Namespace"}
LABELS = {
    f"app.kubernetes.io/{name}"
    for name in ("name", "instance", "component", "part-of", "version", "managed-by")
}


def iterate_containers(release: RenderedRelease) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and specification of every container."""
    for location, _, spec in release.iterate_pods():
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            yield f"{location} {container['name']}", container


@parametrize_value_sets
def test_pods_satisfy_the_restricted_profile(value_set: ValueSet) -> None:
    for location, _, spec in render(value_set).iterate_pods():
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & spec.keys(), location
        assert spec["securityContext"]["runAsNonRoot"] is True, location
        assert spec["securityContext"]["runAsUser"] > 0, location
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", location
        for volume in spec.get("volumes", ()):
            assert volume.keys() - {"name"} <= VOLUME_KINDS, location
    for location, container in iterate_containers(render(value_set)):
        assert not [port for port in container.get("ports", ()) if "hostPort" in port], location
        _check_restricted(location, container["securityContext"])
    for cluster in list_ray_clusters(render(value_set)):
        if "autoscalerOptions" in cluster:
            _check_restricted("the autoscaler", cluster["autoscalerOptions"]["securityContext"])


def _check_restricted(location: str, context: dict[str, Any]) -> None:
    assert context["allowPrivilegeEscalation"] is False, location
    assert context["capabilities"] == {"drop": ["ALL"]}, location
    assert context["readOnlyRootFilesystem"] is True, location
    assert not context.get("privileged"), location


def list_ray_clusters(release: RenderedRelease) -> list[dict[str, Any]]:
    """Return the specification of every Ray cluster."""
    separate_clusters = [item["spec"] for item in release.list_kind("RayCluster")]
    return [release.ray_job["spec"]["rayClusterSpec"], *separate_clusters]


@parametrize_value_sets
def test_roles_grant_only_required_permissions(value_set: ValueSet) -> None:
    release = render(value_set)
    for role in release.list_kind("Role"):
        for rule in role["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    assert set(rule["verbs"]) == ALLOWED_VERBS[group, resource]
            if {"leases", "sandboxwarmpools"} & set(rule["resources"]):
                assert rule["resourceNames"]
            has_sandbox = any(
                item.get("mode") == "sandbox"
                for item in value_set.all_values["environments"].values()
            )
            assert has_sandbox or "extensions.agents.x-k8s.io" not in rule["apiGroups"]
            # Without the policy, the gateway could patch every pod of the namespace.
            assert "pods" not in rule["resources"] or _list_names(
                release, "ValidatingAdmissionPolicyBinding"
            )
    assert not [item for item in release.all_objects if item["kind"] in CLUSTER_WIDE_KINDS]


@parametrize_value_sets
def test_only_kubernetes_api_clients_mount_a_token(value_set: ValueSet) -> None:
    is_autoscaled = value_set.all_values["runs"]["autoscaling"]["enabled"]
    for location, metadata, spec in render(value_set).iterate_pods():
        is_gateway = metadata["labels"]["app.kubernetes.io/component"] == "gateway"
        runs_autoscaler = is_autoscaled and metadata["labels"].get("ludus.dev/group") == "head"
        mounts_token = spec.get("automountServiceAccountToken", True)
        assert mounts_token == (is_gateway or runs_autoscaler), location


@parametrize_value_sets
def test_no_secret_is_in_plain_text(value_set: ValueSet) -> None:
    release = render(value_set)
    assert release.list_kind("Secret") == []
    for location, container in iterate_containers(release):
        for variable in container.get("env", ()):
            if SENSITIVE_NAME.search(variable["name"]):
                assert variable.keys() == {"name", "valueFrom"}, f"{location} {variable['name']}"
                assert "secretKeyRef" in variable["valueFrom"]
        for argument in (*container.get("command", ()), *container.get("args", ())):
            assert not re.search(r"--?\w*(token|password|secret|key)\w*=", argument), location


@parametrize_value_sets
def test_containers_with_environment_code_have_no_secret_of_the_fleet(value_set: ValueSet) -> None:
    for location, metadata, spec in render(value_set).iterate_pods():
        if metadata["labels"]["app.kubernetes.io/component"] != "environment":
            continue
        assert not spec.get("shareProcessNamespace"), location
        secret_volumes = {item["name"] for item in spec["volumes"] if "secret" in item}
        (server,) = spec["containers"]
        assert not secret_volumes & {item["name"] for item in server["volumeMounts"]}, location
        assert not list(_find_values(server, "secretKeyRef")), location
        assert not server.get("envFrom"), location
        # The image of an environment may contain any code.
        (sidecar,) = spec["initContainers"]
        assert sidecar["image"] != server["image"], location
        assert set(_find_values(spec, "key")) >= FLEET_KEYS


@parametrize_value_sets
def test_gateways_read_their_secrets_from_files(value_set: ValueSet) -> None:
    spec = render(value_set).find("Deployment", "-gateway")["spec"]["template"]["spec"]
    (gateway,) = spec["containers"]
    configured_names = {item["name"] for item in value_set.all_values["gateway"]["env"]}
    assert {item["name"] for item in gateway["env"]} <= {"HOME", *configured_names}
    assert not [item for item in gateway["volumeMounts"] if "subPath" in item]  # never updated


@parametrize_value_sets
def test_object_names_are_unique_and_have_namespace_and_labels(value_set: ValueSet) -> None:
    release = render(value_set)
    object_keys = [
        (resource["apiVersion"], resource["kind"], resource["metadata"]["name"])
        for resource in release.objects
    ]
    assert len(set(object_keys)) == len(object_keys)
    for resource in release.all_objects:
        metadata = resource["metadata"]
        assert metadata.get("namespace", value_set.namespace) == value_set.namespace
        assert metadata.get("namespace") is None or resource["kind"] == "RayJob"
        assert metadata["labels"].keys() >= LABELS
        assert len(metadata["name"]) <= 63


@parametrize_value_sets
def test_only_deployments_without_autoscaling_set_replicas(value_set: ValueSet) -> None:
    release = render(value_set)
    scaled_names = {
        item["spec"]["scaleTargetRef"]["name"]
        for kind in ("HorizontalPodAutoscaler", "ScaledObject")
        for item in release.list_kind(kind)
    }
    for target_deployment in release.list_kind("Deployment"):
        assert ("replicas" in target_deployment["spec"]) == (
            target_deployment["metadata"]["name"] not in scaled_names
        )


@parametrize_value_sets
def test_containers_have_probes_resource_limits_and_an_image_tag(value_set: ValueSet) -> None:
    release = render(value_set)
    for location, container in iterate_containers(release):
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), location
        assert "memory" in container["resources"]["limits"], location
        assert not container["image"].endswith(":latest"), location
        assert "@sha256:" in container["image"] or ":" in container["image"].rpartition("/")[2], (
            location
        )
    for deployment in release.list_kind("Deployment"):
        (main_container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= main_container.keys()
    guarded_selectors = [
        item["spec"]["selector"]["matchLabels"] for item in release.list_kind("PodDisruptionBudget")
    ]
    for deployment in release.list_kind("Deployment"):
        if deployment["metadata"]["labels"]["app.kubernetes.io/component"] != "store":
            assert guarded_selectors.count(deployment["spec"]["selector"]["matchLabels"]) == 1


@parametrize_value_sets
def test_every_service_selects_one_set_of_pods(value_set: ValueSet) -> None:
    release = render(value_set)
    pods = {location: metadata["labels"] for location, metadata, _ in release.iterate_pods()}
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
        template_code = " ".join(
            re.findall(r"{{-?(?!-? */\*)(.*?)-?}}", path.read_text(encoding="utf-8"))
        )
        assert not forbidden.search(template_code), path


@pytest.mark.parametrize(
    "value_set", [CPU_SET, GPU_SET, FULL_SET], ids=lambda value_set: value_set.name
)
def test_rendering_is_deterministic(value_set: ValueSet) -> None:
    assert template(value_set).stdout == render(value_set).text


def test_release_without_dashboards_is_small() -> None:
    """Helm stores a release in a Secret of at most 1 MiB."""
    assert len(json.dumps(render(FULL_SET).objects)) < 200_000


def _list_names(release: RenderedRelease, kind: str) -> set[str]:
    return {item["metadata"]["name"] for item in release.list_kind(kind)}


@parametrize_value_sets
def test_mounted_objects_exist_or_are_configured(value_set: ValueSet) -> None:
    release, values = render(value_set), value_set.all_values
    claim_names = _list_names(release, "PersistentVolumeClaim")
    claim_names |= {
        values["storage"]["runs"]["existingClaim"],
        values["runs"]["cache"]["existingClaim"],
    }
    secret_names = {
        values["auth"]["existingSecret"],
        values["storage"]["s3"]["existingSecret"],
        values["gateway"]["tls"]["existingSecret"],
        values["gateway"]["tenants"]["existingSecret"],
    }
    config_map_names = _list_names(release, "ConfigMap") | {"RUN-config"}
    for location, _, spec in release.iterate_pods():
        assert set(_find_values(spec, "claimName")) <= claim_names - {""}, location
        assert set(_find_values(spec, "secretName")) <= secret_names - {""}, location
        assert {item["name"] for item in _find_values(spec, "configMap")} <= config_map_names, (
            location
        )
        assert {item["name"] for item in _find_values(spec, "secretKeyRef")} <= secret_names - {
            ""
        }, location
        volumes = {item["name"] for item in spec.get("volumes", ())}
        mounts = {
            item["name"]
            for container in (*spec.get("initContainers", ()), *spec["containers"])
            for item in container["volumeMounts"]
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
