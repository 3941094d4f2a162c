"""What lies beside a release in a cluster, what KubeRay does there, and what a driver says."""

from __future__ import annotations

from typing import Any

from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import LOG_ROW_PREFIX, MetricsRow, Phase
from tests.gateway.fake_kubernetes import FakeKubernetes
from tests.runs.release import NAMESPACE, Json, config_map

KINDS = {"/apis/ray.io/v1": {"resources": [{"name": "rayjobs"}, {"name": "rayclusters"}]}}
HEAD = "demo-head"
SECRET, CLAIM = "ludus-auth", "ludus-runs"


def node(name: str = "node-1", **allocatable: str) -> Json:
    """A node that has room."""
    amounts = {"cpu": "8", "memory": "32Gi", "pods": "110", **allocatable}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "namespace": "", "labels": {"kubernetes.io/os": "linux"}},
        "spec": {},
        "status": {"allocatable": amounts},
    }


def secret(name: str = SECRET, *keys: str) -> Json:
    """A Secret with these keys."""
    data = dict.fromkeys(keys or ("gateway-token",), "eA==")
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "data": data,
    }


def claim(name: str = CLAIM, mode: str = "ReadWriteMany", phase: str = "Bound") -> Json:
    """The volume that holds the folders of runs."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"accessModes": [mode]},
        "status": {"phase": phase},
    }


def install(cluster: FakeKubernetes, template: Json | None = None, **changes: Any) -> None:
    """Put KubeRay, a node, and a release with its secret and volume into the cluster."""
    cluster.groups.update(KINDS)
    for made in (config_map(template, **changes), node(), secret(), claim()):
        cluster.put(made)


# What KubeRay does.


def set_status(cluster: FakeKubernetes, run: str = "demo", **status: Any) -> None:
    """The operator writes the RayJob's status."""
    job = cluster.get("ray.io/v1", "rayjobs", NAMESPACE, run)
    assert job is not None, f"no RayJob {run}"
    cluster.put({**job, "status": {**(job.get("status") or {}), **status}})


def begin(cluster: FakeKubernetes, run: str = "demo") -> None:
    """The operator starts the cluster of a run, and its driver."""
    set_status(cluster, run, jobDeploymentStatus="Running", rayClusterName=f"{run}-abcde")
    cluster.put(head_pod(run))


def head_pod(run: str = "demo", phase: str = "Running", **status: Any) -> Json:
    """The head of a run's cluster."""
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
    """The head's pod goes, and its log with it."""
    cluster.remove("v1", "pods", NAMESPACE, f"{run}-head")
    cluster.pods.logs.pop(f"{run}-head", None)


# What a driver says.


def phase_row(phase: Phase = Phase.TRAIN) -> str:
    """A line of the log: the run turns to something."""
    return _line(MetricsRow(kind="phase", phase=phase, step=0, elapsed_s=1.0, num_games_trained=0))


def step_row(step: int, reward: float = -0.05) -> str:
    """A line of the log: a step is done."""
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
