"""Network policies of two runs of one release: their pods cannot reach each other.

The runs are submitted with an image that does not exist, so that their pods exist but never start.
Pods with the labels of these pods listen on the ports of Ray instead.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.client_pod import create_python_pod, try_connections
from tests.cluster.installed import (
    CHART,
    ROOT,
    Release,
    find_skip_reason,
    install,
    kubectl,
    wait_until,
)
from tests.cluster.training import EXAMPLE_CONFIG, end_runs

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]
RUNS, GROUPS = ("first", "second"), ("head", "learner", "rollout")
SHARED_CLUSTER = "shared"
"""Name of a pod with the labels of `rayCluster`, which belongs to no run."""
RAY_PORTS = ("6379", "8265", "10001", "8080", "23456")
"""Ports of the head, the metrics of each pod, and a port that a process chose."""
LISTENER = """
import selectors, socket, sys
servers = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
selector = selectors.DefaultSelector()
for server in servers:
    selector.register(server, selectors.EVENT_READ)
while True:
    for key, _ in selector.select():
        key.fileobj.accept()[0].close()
"""
SETTINGS = {
    "gateway.replicas": "1",
    "environments.blackjack.replicas": "1",
    "runs.image.tag": "absent",
    "storage.weights.kind": "folder",
    "storage.s3.existingSecret": "",
    "storage.store.enabled": "false",
}


@dataclass(frozen=True)
class Listener:
    """A pod that listens on the ports of Ray."""

    name: str
    run: str
    address: str


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    with install([CHART / "values-cpu.yaml"], SETTINGS) as release:
        yield release
        end_runs(release)


@pytest.fixture(scope="module")
def listeners(release: Release, tmp_path_factory: pytest.TempPathFactory) -> list[Listener]:
    """Submit the runs; return a listening pod for each group of their pods."""
    for run in RUNS:
        submit_detached(release, run, tmp_path_factory.mktemp(run))
    labels_by_name = {
        f"{run}-{group}": find_labels(release, run, group) for run in RUNS for group in GROUPS
    }
    own_labels = ("ludus.dev/run", "ludus.dev/network")
    labels_by_name[SHARED_CLUSTER] = {
        key: label
        for key, label in labels_by_name[f"{RUNS[0]}-head"].items()
        if key not in own_labels
    }
    for name, labels in labels_by_name.items():
        create_python_pod(release.namespace, name, [LISTENER, *RAY_PORTS], labels)
    names = [f"pod/{name}" for name in labels_by_name]
    kubectl(*("-n", release.namespace, "wait", *names, "--for=condition=Ready", "--timeout=120s"))
    return [
        Listener(name, name.partition("-")[0], release.get("pod", name)["status"]["podIP"])
        for name in labels_by_name
    ]


def submit_detached(release: Release, run: str, folder: Path) -> None:
    """Submit a run from an empty folder, without following it."""
    command = [str(Path(sys.executable).with_name("ludus")), "submit", str(ROOT / EXAMPLE_CONFIG)]
    command += ["--namespace", release.namespace, "--set", f"name={run}", "--detach"]
    subprocess.run(command, cwd=folder, check=True)


def find_labels(release: Release, run: str, group: str) -> dict[str, str]:
    """Wait for a pod of a run; return its labels, except those that Ray's operator selects by."""
    selector = f"ludus.dev/run={run},ludus.dev/group={group}"
    wait_until(lambda: release.get("pods", "-l", selector)["items"], f"a {group} pod of {run}")
    labels = release.get("pods", "-l", selector)["items"][0]["metadata"]["labels"]
    return {key: label for key, label in labels.items() if not key.startswith("ray.io/")}


def test_only_pods_of_one_run_reach_each_other(release: Release, listeners: list[Listener]) -> None:
    for source in listeners:
        targets = {
            (listener.address, port): "reached" if listener.run == source.run else "denied"
            for listener in listeners
            for port in RAY_PORTS
            if listener.name != source.name
        }
        results = try_connections(release.namespace, source.name, *targets)
        assert results == list(targets.values()), (source, dict(zip(targets, results, strict=True)))
