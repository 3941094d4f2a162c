"""Runs that finish, learn and count their losses although each component fails once.

Two commands, each followed by a node's name, stop and start a node:
LUDUS_NODE_KILL and LUDUS_NODE_START (for kind: `docker kill` and `docker start`).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ludus.proto.runs import Summary
from tests.cluster.installed import CHART, Release, find_skip_reason, install, kubectl, wait_until
from tests.cluster.training import STALL_TIMEOUT_S, Training, end_runs, submit

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]
STORE_OUTAGE_S = 30.0
CHECKPOINT_SETTING = "training.checkpoint_every_steps={}"
NODE_KILL_VARIABLE, NODE_START_VARIABLE = "LUDUS_NODE_KILL", "LUDUS_NODE_START"
Fault = Callable[[Release, Training, str], None]
OUT_OF_SERVICE_TAINT = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"


def report_progress(training: Training, event: Fault | str) -> None:
    """Write the progress of the test to stderr."""
    name = event if isinstance(event, str) else event.__name__.replace("_", " ")
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} step {training.step}: {name}\n")


def environment_server_killed(release: Release, training: Training, node: str) -> None:
    """Kill a server's pod with all its sessions."""
    delete_pod(release, list_server_pods(release)[0], immediately=True)


def environment_server_evicted(release: Release, training: Training, node: str) -> None:
    """Evict one server; the second is protected until the first has a replacement."""
    wait_until(lambda: len(list_server_pods(release)) == 2, "two servers that are ready")
    first_pod, second_pod = list_server_pods(release)
    evict_pod(release, first_pod)
    with pytest.raises(AssertionError, match="disruption budget"):
        evict_pod(release, second_pod)


def gateway_killed(release: Release, training: Training, node: str) -> None:
    """Kill one of two gateways."""
    delete_pod(release, list_ready_pods(release, "gateway")[0], immediately=True)


def rollout_worker_killed(release: Release, training: Training, node: str) -> None:
    """Kill the only rollout worker; its replacement starts on the node that fails next."""
    move_worker(node, release, training)


def store_away(release: Release, training: Training, node: str) -> None:
    """Make the weight store unavailable for a while."""
    store_deployment = f"deployment/{release.name}-store"
    kubectl("-n", release.namespace, "scale", store_deployment, "--replicas=0")
    time.sleep(STORE_OUTAGE_S)
    kubectl("-n", release.namespace, "scale", store_deployment, "--replicas=1")
    release.wait_until_ready()


def environment_image_rolled_out(release: Release, training: Training, node: str) -> None:
    """Replace every server after its sessions have ended."""
    deployment = f"deployment/{release.name}-env-blackjack"
    kubectl("-n", release.namespace, "rollout", "restart", deployment)
    release.wait_until_ready()


def node_drained(release: Release, training: Training, node: str) -> None:
    """Drain a node."""
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")
    kubectl("drain", node, *options)
    assert training.find_node("rollout") != node
    kubectl("uncordon", node)


def node_killed(release: Release, training: Training, node: str) -> None:
    """Power off a node with a server and the rollout worker, and mark the node with a taint.

    Without the taint, KubeRay waits for the dead worker until the node returns.
    """
    if NODE_KILL_VARIABLE not in os.environ:
        sys.stderr.write(
            f"SKIPPED, NOT PASSED: {NODE_KILL_VARIABLE} does not say how a node is killed\n"
        )
        return
    with cordon(list_other_nodes(node)):
        delete_pod(release, list_server_pods(release)[0], immediately=True)
        move_worker(node, release, training)
        release.wait_until_ready()
    run_power_command(NODE_KILL_VARIABLE, node)
    try:
        wait_until(lambda: not is_ready(node), "the node to be not ready")
        with mark_powered_off(node):
            wait_until(
                lambda: training.find_node("rollout") != node,
                "another rollout worker",
                STALL_TIMEOUT_S,
            )
            training.wait_for_steps()
    finally:
        run_power_command(NODE_START_VARIABLE, node)


def head_killed(release: Release, training: Training, node: str) -> None:
    """Kill the driver; a retry resumes from the checkpoint."""
    delete_pod(release, training.find_pod("head"), immediately=True)


FAULTS = (
    environment_server_killed,
    environment_server_evicted,
    gateway_killed,
    rollout_worker_killed,
    node_drained,
    environment_image_rolled_out,
    node_killed,
    store_away,
    head_killed,
)


# Tests.


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    with install([CHART / "values-cpu.yaml"]) as release:
        yield release


@pytest.fixture(autouse=True)
def no_run_afterwards(release: Release) -> Iterator[None]:
    yield
    end_runs(release)


def test_a_run_survives_all_faults_and_learns(release: Release, tmp_path: Path) -> None:
    summary = run_with_faults(FAULTS, release, tmp_path / "results", CHECKPOINT_SETTING.format(10))
    assert summary.gap_closed is not None and summary.gap_closed >= 0.90


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_run_survives_one_fault(fault: Fault, release: Release, tmp_path: Path) -> None:
    if fault is node_killed and NODE_KILL_VARIABLE not in os.environ:
        pytest.skip(f"SKIPPED, NOT PASSED: {NODE_KILL_VARIABLE} does not say how a node is killed")
    name = fault.__name__.replace("_", "-")
    # Long enough for a drain or a roll-out.
    settings = (
        f"name={name}",
        "training.num_steps=100",
        "eval.num_games=200",
        CHECKPOINT_SETTING.format(2),
    )
    run_with_faults([fault], release, tmp_path / "results", *settings)


def run_with_faults(
    faults: Iterable[Fault], release: Release, folder: Path, *settings: str
) -> Summary:
    """Return the summary of a run with these faults; check that no step or episode counts twice."""
    nodes = kubectl("get", "nodes", "-o", "name").split()
    assert len(nodes) >= 2, "the test needs two nodes, because it stops one"
    node = nodes[-1].removeprefix("node/")
    with cordon([node]), submit(release, folder, *settings) as training:
        # Head and learner are on nodes that stay.
        training.wait_for_steps(1)
        kubectl("uncordon", node)
        for fault in faults:
            report_progress(training, fault)
            fault(release, training, node)
            training.wait_for_steps()
        report_progress(training, "no more faults")
        summary = training.finish()
    assert summary.finished
    assert summary.canary_failures == 0
    steps = [row.step for row in training.rows if row.kind == "train"]
    assert steps == list(range(1, summary.num_steps + 1)), "each step is there once"
    num_played = sum(row.values["num_episodes"] for row in training.rows if row.kind == "train")
    assert summary.games_played == num_played
    assert summary.games_trained <= summary.games_played - summary.episodes_lost
    return summary


# Parts of faults.


def list_ready_pods(release: Release, component: str) -> list[str]:
    """Return the names of a component's pods that are ready and not terminating."""
    label = f"app.kubernetes.io/component={component}"
    return [
        pod["metadata"]["name"]
        for pod in release.get("pods", "-l", label)["items"]
        if "deletionTimestamp" not in pod["metadata"]
        and {"type": "Ready", "status": "True"}.items()
        <= next(
            condition for condition in pod["status"]["conditions"] if condition["type"] == "Ready"
        ).items()
    ]


def list_server_pods(release: Release) -> list[str]:
    """Return the names of the ready environment servers."""
    return list_ready_pods(release, "environment")


def delete_pod(release: Release, pod: str, *, immediately: bool) -> None:
    """Delete a pod, `immediately` without a grace period."""
    options = ("--grace-period=0", "--force") if immediately else ()
    kubectl("-n", release.namespace, "delete", "pod", pod, "--wait=false", *options)


def evict_pod(release: Release, pod: str) -> None:
    """Evict a pod as `kubectl drain` does; a refusal raises an error."""
    path = f"/api/v1/namespaces/{release.namespace}/pods/{pod}/eviction"
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": release.namespace},
    }
    kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def move_worker(node: str, release: Release, training: Training) -> None:
    """Kill the rollout worker so that its replacement starts on this node."""
    with cordon(list_other_nodes(node)):
        previous_pod = training.find_pod("rollout")
        delete_pod(release, previous_pod, immediately=True)
        wait_until(
            lambda: training.find_pod("rollout") != previous_pod,
            "another rollout worker",
            STALL_TIMEOUT_S,
        )
    assert training.find_node("rollout") == node


def list_other_nodes(node: str) -> list[str]:
    """Return the names of the other nodes."""
    names = kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split()
    return [name for name in names if name != node]


def is_ready(node: str) -> bool:
    """Return True if the node reports that it is ready."""
    status_path = '{.status.conditions[?(@.type=="Ready")].status}'
    return kubectl("get", "node", node, "-o", f"jsonpath={status_path}") == "True"


@contextmanager
def cordon(nodes: list[str]) -> Iterator[None]:
    """Keep new pods off these nodes inside the context."""
    try:
        for node in nodes:
            kubectl("cordon", node)
        yield
    finally:
        for node in nodes:
            kubectl("uncordon", node)


@contextmanager
def mark_powered_off(node: str) -> Iterator[None]:
    """Mark the node as powered off, so that Kubernetes gives up its pods at once."""
    kubectl("taint", "node", node, OUT_OF_SERVICE_TAINT)
    try:
        yield
    finally:
        kubectl("taint", "node", node, f"{OUT_OF_SERVICE_TAINT}-")


def run_power_command(variable: str, node: str) -> None:
    """Run the command in this environment variable for a node."""
    subprocess.run([*shlex.split(os.environ[variable]), node], check=True)
