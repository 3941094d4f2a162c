"""Fake cluster resources, actions of KubeRay, and log lines of a driver."""

from __future__ import annotations

from typing import Any

from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import LOG_ROW_PREFIX, MetricsRow, Phase
from tests.gateway.fake_kubernetes import FakeKubernetes
from tests.runs.release import NAMESPACE, Json, make_config_map

KINDS = {"/apis/ray.io/v1": {"resources": [{"name": "rayjobs"}, {"name": "rayclusters"}]}}
HEAD = "demo-head"
SECRET, CLAIM = "ludus-auth", "ludus-runs"


def make_node(name: str = "node-1", **allocatable: str) -> Json:
    """Return a node with free resources."""
    amounts = {"cpu": "8", "memory": "32Gi", "pods": "110", **allocatable}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "namespace": "", "labels": {"kubernetes.io/os": "linux"}},
        "spec": {},
        "status": {"allocatable": amounts},
    }


def make_secret(name: str = SECRET, *keys: str) -> Json:
    """Return a Secret with these keys."""
    encoded_values = dict.fromkeys(keys or ("gateway-token",), "eA==")
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "data": encoded_values,
    }


def make_volume_claim(name: str = CLAIM, mode: str = "ReadWriteMany", phase: str = "Bound") -> Json:
    """Return the claim of the volume with the run folders."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"accessModes": [mode]},
        "status": {"phase": phase},
    }


def install_release(cluster: FakeKubernetes, template: Json | None = None, **changes: Any) -> None:
    """Add KubeRay, a node, and a release with its secret and volume to the cluster."""
    cluster.groups.update(KINDS)
    for resource in (
        make_config_map(template, **changes),
        make_node(),
        make_secret(),
        make_volume_claim(),
    ):
        cluster.put(resource)


# Actions of KubeRay.


def set_status(cluster: FakeKubernetes, run: str = "demo", **status: Any) -> None:
    """Write the RayJob's status as the operator does."""
    job = cluster.get("ray.io/v1", "rayjobs", NAMESPACE, run)
    assert job is not None, f"no RayJob {run}"
    cluster.put({**job, "status": {**(job.get("status") or {}), **status}})


def start_cluster(cluster: FakeKubernetes, run: str = "demo") -> None:
    """Start the cluster of a run and its driver as the operator does."""
    set_status(cluster, run, jobDeploymentStatus="Running", rayClusterName=f"{run}-abcde")
    cluster.put(make_head_pod(run))


def make_head_pod(run: str = "demo", phase: str = "Running", **status: Any) -> Json:
    """Return the head pod of a run's cluster."""
    labels = {"ray.io/cluster": f"{run}-abcde", "ray.io/node-type": "head"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{run}-head",
            "namespace": NAMESPACE,
            "labels": {**labels, "ray.io/group": "headgroup"},
        },
        "spec": {"nodeName": "node-1", "containers": [{"name": "ray-head"}]},
        "status": {"phase": phase, **status},
    }


def lose_head(cluster: FakeKubernetes, run: str = "demo") -> None:
    """Remove the head pod and its log."""
    cluster.remove("v1", "pods", NAMESPACE, f"{run}-head")
    cluster.pods.logs.pop(f"{run}-head", None)


# Log lines of a driver.


def format_phase_line(phase: Phase = Phase.TRAIN, step: int = 0) -> str:
    """Return the log line for the start of a phase."""
    row = MetricsRow(kind="phase", phase=phase, step=step, elapsed_s=1.0, num_games_trained=0)
    return _line(row)


def format_step_line(step: int, reward: float = -0.05) -> str:
    """Return the log line for a finished step."""
    return _line(
        MetricsRow(
            kind="train",
            step=step,
            elapsed_s=float(step),
            num_games_trained=256 * step,
            values={TrainMetric.REWARD_MEAN: reward},
        )
    )


def _line(row: MetricsRow) -> str:
    return f"{LOG_ROW_PREFIX}{row.model_dump_json(exclude_defaults=True)}"
