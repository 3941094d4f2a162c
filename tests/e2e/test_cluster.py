"""A run on a Ray cluster of several nodes. Each group of nodes offers a different resource."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from ludus.proto.runs import LOG_ROW_PREFIX, MetricsRow
from tests.e2e.runs import Run, start_run

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

CLUSTER_PROGRAM = """
import sys
from ray.cluster_utils import Cluster

memory = 100 * 2**20
cluster = Cluster()

def add(cpus, group, count):
    return cluster.add_node(
        num_cpus=int(cpus),
        resources={group: int(count)},
        object_store_memory=memory,
        include_dashboard=False,
    )

for line in sys.stdin:
    try:
        node = add(*line.split())
    except Exception as error:  # Ray raises no more specific error
        if "timed out during startup" not in str(error):
            raise
        node = add(*line.split())  # a busy machine may exceed Ray's timeout of 30 s
    print(cluster.address, node.all_processes["raylet"][0].process.pid, flush=True)
cluster.shutdown()
"""


@dataclass(slots=True)
class RayCluster:
    """A Ray cluster whose nodes are processes on this machine. The first node is the head."""

    process: subprocess.Popen[str]
    address: str = ""
    raylets: dict[str, list[int]] = field(default_factory=dict)
    """Process ids of the nodes' raylets, by group."""
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Processes of the nodes that `start_node` started."""

    def add_node(self, group: str, *, num_cpus: int = 1, amount: int = 1) -> None:
        """Add a node with this amount of the resource `group`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{num_cpus} {group} {amount}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline().split()
        assert line, "a node did not start"
        self.address = line[0]
        self.raylets.setdefault(group, []).append(int(line[1]))

    def start_node(self, group: str) -> subprocess.Popen[bytes]:
        """Start a node as in a pod and return its process. SIGTERM drains and stops the node."""
        node = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                *(f"--address={self.address}", "--num-cpus=1", f'--resources={{"{group}": 1}}'),
                *("--object-store-memory=100000000", "--dashboard-agent-listen-port=0"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "900"},
        )
        self.nodes.append(node)
        return node

    def find_groups(self, kind: str) -> list[str]:
        """Return the group of each actor of class `kind`."""
        return [
            group
            for group, raylets in sorted(self.raylets.items())
            for raylet in raylets
            for command in list_child_commands(raylet)
            if f"ray::{kind}" in command
        ]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """Yield a cluster of a head node without CPUs, a learner node and a rollout node."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER_PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        cluster = RayCluster(process)
        cluster.add_node("head", num_cpus=0, amount=1000)
        cluster.add_node("learner")
        cluster.add_node("rollout")
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        for node in (node for node in cluster.nodes if node.poll() is None):
            for child_process in psutil.Process(node.pid).children(recursive=True):
                child_process.kill()
            node.kill()
            node.wait()
        assert process.stdin is not None
        process.stdin.close()


def test_actors_run_on_assigned_nodes_and_workers_follow_node_changes(
    cluster: RayCluster, tmp_path: Path
) -> None:
    overrides = ("rollout.num_workers=2", "rollout.min_workers=1", "training.num_steps=5000")
    with start_run(tmp_path, *overrides, flags=("--resume=auto",)) as run:
        run.wait_until(lambda: run.last_step >= 2)
        assert cluster.find_groups("BufferActor") == ["head"]
        assert cluster.find_groups("LearnerActor") == ["learner"]
        assert cluster.find_groups("RolloutWorkerActor") == ["rollout"]
        node = cluster.start_node("rollout")
        run.wait_until(lambda: len(list_weight_versions(run)) == 2)
        versions = list_weight_versions(run)
        assert len(set(versions)) == 1 and versions[0] >= 2
        node.send_signal(signal.SIGTERM)
        node.wait(600)  # The node stops after its last episode, before the drain timeout.
        step = run.last_step
        run.wait_until(lambda: run.last_step > step + 1)
        assert len(list_weight_versions(run)) == 1
        lost_counts = [row.values["num_episodes_lost"] for row in run.rows if row.kind == "train"]
        assert sum(lost_counts) == 0, "episodes were lost when the node stopped"
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(300) == 130, run.output()
        lines = run.output().splitlines()
    log_rows = [
        MetricsRow.model_validate_json(line.partition(LOG_ROW_PREFIX)[2])
        for line in lines  # output of Ray may precede the JSON on the same line
        if LOG_ROW_PREFIX in line
    ]
    assert [row for row in run.rows if row.kind in ("phase", "train", "eval", "event")] == log_rows
    assert not list(run.folder.glob(".token-*"))


def list_child_commands(pid: int) -> Iterator[str]:
    """Yield the command line of each child process."""
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # an idle child may exit at any time
            yield " ".join(child.cmdline())


def list_weight_versions(run: Run) -> list[int]:
    """Return the versions of the workers' weights after the latest delivery."""
    weight_rows = [row for row in run.rows if row.kind == "weights"]
    return [weights.version for weights in weight_rows[-1].weights] if weight_rows else []
