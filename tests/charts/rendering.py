"""The chart as helm renders it.

ValueSet --helm template--> Rendered: objects, and the objects in a RayJob's template
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "ludus"
KINDS = (
    "extensions.agents.x-k8s.io/v1beta1/SandboxWarmPool",
    "gateway.networking.k8s.io/v1/GRPCRoute",
    "gateway.networking.k8s.io/v1/HTTPRoute",
    "keda.sh/v1alpha1/ScaledObject",
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "ray.io/v1/RayCluster",
    "ray.io/v1/RayJob",
)
"""API kinds of a cluster with every operator, in addition to those of Kubernetes."""

Object = dict[str, Any]


@dataclass(frozen=True)
class ValueSet:
    """A set of values to install the chart with."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    """A values file of the chart that `values` override."""
    release: str = "ludus"
    namespace: str = "arena"
    kinds: tuple[str, ...] = KINDS

    def __hash__(self) -> int:
        return hash(self.name)

    @functools.cached_property
    def all_values(self) -> dict[str, Any]:
        """The values with the defaults of the chart."""
        files = ["values.yaml", *([self.file] if self.file else [])]
        merged: dict[str, Any] = {}
        for name in files:
            merged = merge_values(
                merged, yaml.safe_load((CHART / name).read_text(encoding="utf-8"))
            )
        return merge_values(merged, self.values)


def merge_values(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge two nested maps; `changes` override `base`."""
    merged = dict(base)
    for key, value in changes.items():
        base_value = merged.get(key)
        is_nested = isinstance(value, dict) and isinstance(base_value, dict)
        merged[key] = merge_values(base_value, value) if is_nested else value
    return merged


def find_helm() -> str:
    """Return the path of helm: from its PyPI package, or from PATH."""
    packaged_path = Path(sys.executable).parent / "helm"
    path = str(packaged_path) if packaged_path.exists() else shutil.which("helm")
    if path is None:
        pytest.skip("expected helm in .venv or PATH, got none: nothing of the chart is tested")
    return path


def run_helm(
    command: str, value_set: ValueSet, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Return the result of `helm lint` or `helm template` for the values."""
    with tempfile.TemporaryDirectory() as folder:
        values_path = Path(folder) / "values.yaml"
        values_path.write_text(yaml.safe_dump(value_set.values))
        files = [f"--values={CHART / value_set.file}"] if value_set.file else []
        release_name = [] if command == "lint" else [value_set.release]
        return subprocess.run(
            [
                *(
                    find_helm(),
                    command,
                    *release_name,
                    str(CHART),
                    *files,
                    f"--values={values_path}",
                ),
                *("--namespace", value_set.namespace, *arguments),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


def template(value_set: ValueSet) -> subprocess.CompletedProcess[str]:
    """Run `helm template` for an API server that has the kinds of the value set."""
    return run_helm("template", value_set, *(f"--api-versions={kind}" for kind in value_set.kinds))


class Rendered:
    """The objects of a release, and those that `ludus submit` creates from it."""

    def __init__(self, value_set: ValueSet, text: str) -> None:
        self.value_set = value_set
        self.text = text
        self.objects: list[Object] = [
            document for document in yaml.load_all(text, yaml.CSafeLoader) if document is not None
        ]

    def list_kind(self, kind: str) -> list[Object]:
        """Return the objects of a kind."""
        return [resource for resource in self.objects if resource["kind"] == kind]

    def find(self, kind: str, ending: str = "") -> Object:
        """Return the only object of a kind whose name has this ending."""
        matches = [
            resource
            for resource in self.list_kind(kind)
            if resource["metadata"]["name"].endswith(ending)
        ]
        assert len(matches) == 1, f"{len(matches)} of {kind} *{ending}"
        return matches[0]

    @property
    def gateway_toml(self) -> str:
        """The gateway's configuration."""
        return str(self.find("ConfigMap", "-gateway")["data"]["gateway.toml"])

    @functools.cached_property
    def ray_job(self) -> Object:
        """The RayJob of a run."""
        return yaml.load(self._runs["rayjob.yaml"], yaml.CSafeLoader)  # type: ignore[no-any-return]

    @property
    def ray_job_text(self) -> str:
        """The RayJob's text in the ConfigMap."""
        return str(self._runs["rayjob.yaml"])

    @functools.cached_property
    def platform(self) -> dict[str, Any]:
        """The description of the release that `ludus submit` reads."""
        return json.loads(self._runs["platform.json"])  # type: ignore[no-any-return]

    @functools.cached_property
    def all_objects(self) -> list[Object]:
        """The objects and the RayJob."""
        return [*self.objects, self.ray_job]

    @property
    def _runs(self) -> dict[str, str]:
        matches = [
            resource
            for resource in self.list_kind("ConfigMap")
            if resource["metadata"]["labels"].get("ludus.dev/runs") == "true"
        ]
        assert len(matches) == 1
        return matches[0]["data"]  # type: ignore[no-any-return]

    def iterate_pods(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Yield the location, metadata and specification of every pod."""
        for resource in self.all_objects:
            location = f"{resource['kind']}/{resource['metadata']['name']}"
            for metadata, spec in _iterate_pods(resource):
                yield location, metadata, spec


def _iterate_pods(resource: Object) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    spec = resource.get("spec", {})
    match resource["kind"]:
        case "Pod":
            yield resource["metadata"], spec
        case "Deployment":
            yield spec["template"]["metadata"], spec["template"]["spec"]
        case "SandboxTemplate":
            yield spec["podTemplate"]["metadata"], spec["podTemplate"]["spec"]
        case "RayCluster" | "RayJob":
            cluster = spec.get("rayClusterSpec", spec)
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                yield group["template"]["metadata"], group["template"]["spec"]


@functools.cache
def render(value_set: ValueSet) -> Rendered:
    """Render the release of a value set."""
    result = template(value_set)
    assert result.returncode == 0, result.stderr
    return Rendered(value_set, result.stdout)
