"""The chart, rendered by helm.

ValueSet --helm template--> RenderedRelease: objects, and the RayJob in a ConfigMap
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
"""API kinds that the operators add to a cluster."""

Object = dict[str, Any]


@dataclass(frozen=True)
class ValueSet:
    """A set of values for installing the chart."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    """Name of a values file of the chart; `values` override the file."""
    release: str = "ludus"
    namespace: str = "arena"
    kinds: tuple[str, ...] = KINDS

    def __hash__(self) -> int:
        return hash(self.name)

    @functools.cached_property
    def all_values(self) -> dict[str, Any]:
        """Values, including the defaults of the chart."""
        files = ["values.yaml", *([self.file] if self.file else [])]
        merged_values: dict[str, Any] = {}
        for name in files:
            merged_values = merge_values(
                merged_values, yaml.safe_load((CHART / name).read_text(encoding="utf-8"))
            )
        return merge_values(merged_values, self.values)


def merge_values(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge two nested maps; `changes` override `base`."""
    merged_values = dict(base)
    for key, value in changes.items():
        base_value = merged_values.get(key)
        is_nested = isinstance(value, dict) and isinstance(base_value, dict)
        merged_values[key] = merge_values(base_value, value) if is_nested else value
    return merged_values


def find_helm() -> str:
    """Return the path of helm, installed from PyPI or in PATH."""
    packaged_path = Path(sys.executable).parent / "helm"
    path = str(packaged_path) if packaged_path.exists() else shutil.which("helm")
    if path is None:
        pytest.skip("helm is neither in .venv nor in PATH")
    return path


def run_helm(
    command: str, value_set: ValueSet, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run `helm lint` or `helm template` for the values, and return the finished process."""
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
    """Run `helm template` for an API server with the API kinds of the value set."""
    return run_helm("template", value_set, *(f"--api-versions={kind}" for kind in value_set.kinds))


class RenderedRelease:
    """The objects of a release, and the RayJob that `ludus submit` creates."""

    def __init__(self, value_set: ValueSet, text: str) -> None:
        self.value_set = value_set
        self.text = text
        self.objects: list[Object] = [
            document for document in yaml.load_all(text, yaml.CSafeLoader) if document is not None
        ]

    def list_kind(self, kind: str) -> list[Object]:
        """Return the objects of a kind."""
        return [resource for resource in self.objects if resource["kind"] == kind]

    def find(self, kind: str, name_suffix: str = "") -> Object:
        """Return the only object of a kind whose name has this suffix."""
        matches = [
            resource
            for resource in self.list_kind(kind)
            if resource["metadata"]["name"].endswith(name_suffix)
        ]
        assert len(matches) == 1, f"expected one {kind} named *{name_suffix}, got {len(matches)}"
        return matches[0]

    @property
    def gateway_toml(self) -> str:
        """Text of the gateway's configuration file."""
        return str(self.find("ConfigMap", "-gateway")["data"]["gateway.toml"])

    @functools.cached_property
    def ray_job(self) -> Object:
        """The RayJob of a run."""
        return yaml.load(self._run_files["rayjob.yaml"], yaml.CSafeLoader)  # type: ignore[no-any-return]

    @property
    def ray_job_text(self) -> str:
        """Text of the RayJob in the ConfigMap."""
        return str(self._run_files["rayjob.yaml"])

    @functools.cached_property
    def platform(self) -> dict[str, Any]:
        """Description of the release, for `ludus submit`."""
        return json.loads(self._run_files["platform.json"])  # type: ignore[no-any-return]

    @functools.cached_property
    def all_objects(self) -> list[Object]:
        """Objects of the release, and the RayJob and the NetworkPolicy of a run."""
        policy_text = self._run_files.get("networkpolicy.yaml")
        policies = [yaml.load(policy_text, yaml.CSafeLoader)] if policy_text else []
        # The placeholder of the run's name is not a valid name of an object.
        for policy in policies:
            policy["metadata"]["name"] = policy["metadata"]["name"].lower()
        return [*self.objects, self.ray_job, *policies]

    @property
    def _run_files(self) -> dict[str, str]:
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
def render(value_set: ValueSet) -> RenderedRelease:
    """Render the release of a value set."""
    result = template(value_set)
    assert result.returncode == 0, result.stderr
    return RenderedRelease(value_set, result.stdout)
