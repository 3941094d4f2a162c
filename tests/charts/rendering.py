"""The chart as helm renders it.

ValueSet --helm template--> Rendered: objects, and what a RayJob's template holds
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
"""What a cluster with every operator knows beside Kubernetes' own."""

Object = dict[str, Any]


@dataclass(frozen=True)
class ValueSet:
    """Values that somebody could install the chart with."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    """A file of the chart below `values`."""
    release: str = "ludus"
    namespace: str = "arena"
    kinds: tuple[str, ...] = KINDS

    def __hash__(self) -> int:
        return hash(self.name)

    @functools.cached_property
    def all_values(self) -> dict[str, Any]:
        """With the defaults of the chart."""
        files = ["values.yaml", *([self.file] if self.file else [])]
        merged: dict[str, Any] = {}
        for name in files:
            merged = over(merged, yaml.safe_load((CHART / name).read_text(encoding="utf-8")))
        return over(merged, self.values)


def over(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The one map over the other, level by level."""
    merged = dict(base)
    for key, value in given.items():
        below = merged.get(key)
        is_below = isinstance(value, dict) and isinstance(below, dict)
        merged[key] = over(below, value) if is_below else value
    return merged


def helm() -> str:
    """The program; from its package on PyPI, or this machine's own."""
    packaged = Path(sys.executable).parent / "helm"
    found = str(packaged) if packaged.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("expected helm in .venv or PATH, got none: nothing of the chart is tested")
    return found


def run_helm(command: str, chosen: ValueSet, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What `helm lint` or `helm template` says to the values."""
    with tempfile.TemporaryDirectory() as folder:
        values = Path(folder) / "values.yaml"
        values.write_text(yaml.safe_dump(chosen.values))
        files = [f"--values={CHART / chosen.file}"] if chosen.file else []
        place = [] if command == "lint" else [chosen.release]
        return subprocess.run(
            [
                *(helm(), command, *place, str(CHART), *files, f"--values={values}"),
                *("--namespace", chosen.namespace, *arguments),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


def template(chosen: ValueSet) -> subprocess.CompletedProcess[str]:
    """`helm template` where the API server knows the set's kinds."""
    return run_helm("template", chosen, *(f"--api-versions={kind}" for kind in chosen.kinds))


class Rendered:
    """The objects of a release, and those that `ludus submit` makes of it."""

    def __init__(self, chosen: ValueSet, text: str) -> None:
        self.chosen = chosen
        self.text = text
        self.objects: list[Object] = [
            one for one in yaml.load_all(text, yaml.CSafeLoader) if one is not None
        ]

    def of_kind(self, kind: str) -> list[Object]:
        """The objects of a kind."""
        return [one for one in self.objects if one["kind"] == kind]

    def one(self, kind: str, ending: str = "") -> Object:
        """The one object of a kind whose name ends so."""
        found = [one for one in self.of_kind(kind) if one["metadata"]["name"].endswith(ending)]
        assert len(found) == 1, f"{len(found)} of {kind} *{ending}"
        return found[0]

    @property
    def gateway_toml(self) -> str:
        """The gateway's configuration."""
        return str(self.one("ConfigMap", "-gateway")["data"]["gateway.toml"])

    @functools.cached_property
    def ray_job(self) -> Object:
        """The RayJob of a run."""
        return yaml.load(self._runs["rayjob.yaml"], yaml.CSafeLoader)  # type: ignore[no-any-return]

    @property
    def ray_job_text(self) -> str:
        """The same as it stands in the ConfigMap."""
        return str(self._runs["rayjob.yaml"])

    @functools.cached_property
    def platform(self) -> dict[str, Any]:
        """What `ludus submit` knows of the release."""
        return json.loads(self._runs["platform.json"])  # type: ignore[no-any-return]

    @functools.cached_property
    def everything(self) -> list[Object]:
        """The objects and the RayJob."""
        return [*self.objects, self.ray_job]

    @property
    def _runs(self) -> dict[str, str]:
        found = [
            one
            for one in self.of_kind("ConfigMap")
            if one["metadata"]["labels"].get("ludus.dev/runs") == "true"
        ]
        assert len(found) == 1
        return found[0]["data"]  # type: ignore[no-any-return]

    def pods(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Where it is, metadata and specification of every pod."""
        for one in self.everything:
            place = f"{one['kind']}/{one['metadata']['name']}"
            for metadata, spec in _pods_of(one):
                yield place, metadata, spec


def _pods_of(found: Object) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    spec = found.get("spec", {})
    match found["kind"]:
        case "Pod":
            yield found["metadata"], spec
        case "Deployment":
            yield spec["template"]["metadata"], spec["template"]["spec"]
        case "SandboxTemplate":
            yield spec["podTemplate"]["metadata"], spec["podTemplate"]["spec"]
        case "RayCluster" | "RayJob":
            cluster = spec.get("rayClusterSpec", spec)
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                yield group["template"]["metadata"], group["template"]["spec"]


@functools.cache
def rendered(chosen: ValueSet) -> Rendered:
    """The release that the values come to."""
    done = template(chosen)
    assert done.returncode == 0, done.stderr
    return Rendered(chosen, done.stdout)
