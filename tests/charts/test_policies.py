"""What every release keeps to: the profile `restricted`, least rights, no secret in sight."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.charts.rendering import CHART, Object, Rendered, ValueSet, rendered, template
from tests.charts.value_sets import ALL, CPU, EVERYTHING, GPU

pytestmark = pytest.mark.slow
every_set = pytest.mark.parametrize("chosen", ALL, ids=lambda one: one.name)
VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
"""Kinds that `restricted` allows and the chart needs."""
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
    """Every container with the place where it stands."""
    for place, _, spec in release.pods():
        for one in (*spec.get("initContainers", ()), *spec["containers"]):
            yield f"{place} {one['name']}", one


@every_set
def test_pods_keep_to_the_restricted_profile(chosen: ValueSet) -> None:
    for place, _, spec in rendered(chosen).pods():
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & spec.keys(), place
        assert spec["securityContext"]["runAsNonRoot"] is True, place
        assert spec["securityContext"]["runAsUser"] > 0, place
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", place
        for volume in spec.get("volumes", ()):
            assert volume.keys() - {"name"} <= VOLUMES, place
    for place, one in containers(rendered(chosen)):
        assert not [port for port in one.get("ports", ()) if "hostPort" in port], place
        _is_restricted(place, one["securityContext"])
    for cluster in ray_clusters(rendered(chosen)):
        if "autoscalerOptions" in cluster:
            _is_restricted("the autoscaler", cluster["autoscalerOptions"]["securityContext"])


def _is_restricted(place: str, context: dict[str, Any]) -> None:
    assert context["allowPrivilegeEscalation"] is False, place
    assert context["capabilities"] == {"drop": ["ALL"]}, place
    assert context["readOnlyRootFilesystem"] is True, place
    assert not context.get("privileged"), place


def ray_clusters(release: Rendered) -> list[dict[str, Any]]:
    """The specifications of every Ray cluster."""
    alone = [one["spec"] for one in release.of_kind("RayCluster")]
    return [release.ray_job["spec"]["rayClusterSpec"], *alone]


@every_set
def test_rights_are_those_that_are_used(chosen: ValueSet) -> None:
    release = rendered(chosen)
    for role in release.of_kind("Role"):
        for rule in role["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    assert set(rule["verbs"]) == RIGHTS[group, resource]
            if {"leases", "sandboxwarmpools"} & set(rule["resources"]):
                assert rule["resourceNames"]
            sandboxed = any(
                one.get("mode") == "sandbox" for one in chosen.all_values["environments"].values()
            )
            assert sandboxed or "extensions.agents.x-k8s.io" not in rule["apiGroups"]
    assert not [one for one in release.everything if one["kind"] in CLUSTER_WIDE]


@every_set
def test_only_who_asks_the_api_server_can_show_a_token_to_it(chosen: ValueSet) -> None:
    scaled = chosen.all_values["runs"]["autoscaling"]["enabled"]
    for place, metadata, spec in rendered(chosen).pods():
        is_gateway = metadata["labels"]["app.kubernetes.io/component"] == "gateway"
        is_scaler = scaled and metadata["labels"].get("ludus.dev/group") == "head"
        shows = spec.get("automountServiceAccountToken", True)
        assert shows == (is_gateway or is_scaler), place


@every_set
def test_no_secret_stands_where_everybody_reads(chosen: ValueSet) -> None:
    release = rendered(chosen)
    assert release.of_kind("Secret") == []
    for place, one in containers(release):
        for variable in one.get("env", ()):
            if SENSITIVE.search(variable["name"]):
                assert variable.keys() == {"name", "valueFrom"}, f"{place} {variable['name']}"
                assert "secretKeyRef" in variable["valueFrom"]
        for argument in (*one.get("command", ()), *one.get("args", ())):
            assert not re.search(r"--?\w*(token|password|secret|key)\w*=", argument), place


@every_set
def test_objects_belong_to_the_release_alone(chosen: ValueSet) -> None:
    release = rendered(chosen)
    ends = [(one["apiVersion"], one["kind"], one["metadata"]["name"]) for one in release.objects]
    assert len(set(ends)) == len(ends)
    for one in release.everything:
        metadata = one["metadata"]
        assert metadata.get("namespace", chosen.namespace) == chosen.namespace
        assert metadata.get("namespace") is None or one["kind"] == "RayJob"
        assert metadata["labels"].keys() >= LABELS
        assert len(metadata["name"]) <= 63


@every_set
def test_nothing_that_scales_has_a_number_of_replicas(chosen: ValueSet) -> None:
    release = rendered(chosen)
    scaled = {
        one["spec"]["scaleTargetRef"]["name"]
        for kind in ("HorizontalPodAutoscaler", "ScaledObject")
        for one in release.of_kind(kind)
    }
    for one in release.of_kind("Deployment"):
        assert ("replicas" in one["spec"]) == (one["metadata"]["name"] not in scaled)


@every_set
def test_every_container_has_probes_bounds_and_a_tag(chosen: ValueSet) -> None:
    release = rendered(chosen)
    for place, one in containers(release):
        assert {"cpu", "memory"} <= one["resources"]["requests"].keys(), place
        assert "memory" in one["resources"]["limits"], place
        assert not one["image"].endswith(":latest"), place
        assert "@sha256:" in one["image"] or ":" in one["image"].rpartition("/")[2], place
    for found in release.of_kind("Deployment"):
        (one,) = found["spec"]["template"]["spec"]["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= one.keys()
    guarded = [
        one["spec"]["selector"]["matchLabels"] for one in release.of_kind("PodDisruptionBudget")
    ]
    for found in release.of_kind("Deployment"):
        if found["metadata"]["labels"]["app.kubernetes.io/component"] != "store":
            assert guarded.count(found["spec"]["selector"]["matchLabels"]) == 1


@every_set
def test_services_and_budgets_select_one_set_of_pods(chosen: ValueSet) -> None:
    release = rendered(chosen)
    pods = {place: metadata["labels"] for place, metadata, _ in release.pods()}
    services = [one for one in release.of_kind("Service") if one["spec"].get("selector")]
    for one in services:
        wanted = one["spec"]["selector"].items()
        assert len([place for place, labels in pods.items() if wanted <= labels.items()]) == 1


def test_templates_ask_neither_chance_nor_the_cluster() -> None:
    forbidden = re.compile(
        r"\b(lookup|rand\w+|uuidv4|genCA|gen\w+Cert|genPrivateKey|htpasswd|bcrypt|now|tpl) "
    )
    for path in (CHART / "templates").rglob("*.*"):
        code = " ".join(re.findall(r"{{-?(?!-? */\*)(.*?)-?}}", path.read_text(encoding="utf-8")))
        assert not forbidden.search(code), path


@pytest.mark.parametrize("chosen", [CPU, GPU, EVERYTHING], ids=lambda one: one.name)
def test_a_release_is_rendered_alike_every_time(chosen: ValueSet) -> None:
    assert template(chosen).stdout == rendered(chosen).text


def test_without_dashboards_a_release_is_small() -> None:
    """Helm keeps it in a Secret of at most a mebibyte."""
    assert len(json.dumps(rendered(EVERYTHING).objects)) < 200_000


def _named(release: Rendered, kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in release.of_kind(kind)}


@every_set
def test_what_is_mounted_is_there_or_was_named(chosen: ValueSet) -> None:
    release, values = rendered(chosen), chosen.all_values
    claims = _named(release, "PersistentVolumeClaim")
    claims |= {values["storage"]["runs"]["existingClaim"], values["runs"]["cache"]["existingClaim"]}
    secrets = {
        values["auth"]["existingSecret"],
        values["storage"]["s3"]["existingSecret"],
        values["gateway"]["tls"]["existingSecret"],
        values["gateway"]["tenants"]["existingSecret"],
    }
    maps = _named(release, "ConfigMap") | {"RUN-config"}
    for place, _, spec in release.pods():
        assert set(_used(spec, "claimName")) <= claims - {""}, place
        assert set(_used(spec, "secretName")) <= secrets - {""}, place
        assert {one["name"] for one in _used(spec, "configMap")} <= maps, place
        assert {one["name"] for one in _used(spec, "secretKeyRef")} <= secrets - {""}, place
        volumes = {one["name"] for one in spec.get("volumes", ())}
        mounts = {one["name"] for each in spec["containers"] for one in each["volumeMounts"]}
        assert mounts == volumes, place


def _used(found: Object | list[Any] | Any, key: str) -> Iterator[Any]:
    if isinstance(found, dict):
        for name, value in found.items():
            if name == key:
                yield value
            yield from _used(value, key)
    elif isinstance(found, list):
        for one in found:
            yield from _used(one, key)
