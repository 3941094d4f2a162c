"""Runs that finish, learn and report lost episodes even if each component fails once.

LUDUS_NODE_KILL and LUDUS_NODE_START contain the commands that stop and start a node, without the
node's name. For kind, they are `docker kill` and `docker start`.
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


def kill_environment_server(release: Release, training: Training, node: str) -> None:
    """Kill the pod of an environment server and all its sessions."""
    delete_pod(release, list_server_pods(release)[0], immediately=True)


def evict_environment_server(release: Release, training: Training, node: str) -> None:
    """Evict a server, and check that the disruption budget protects the other server."""
    wait_until(lambda: len(list_server_pods(release)) == 2, "two ready servers")
    first_pod, second_pod = list_server_pods(release)
    evict_pod(release, first_pod)
    with pytest.raises(AssertionError, match="disruption budget"):
        evict_pod(release, second_pod)


def kill_gateway(release: Release, training: Training, node: str) -> None:
    """Kill one of two gateways."""
    delete_pod(release, list_ready_pods(release, "gateway")[0], immediately=True)


def kill_rollout_worker(release: Release, training: Training, node: str) -> None:
    """Kill the only rollout worker, and let its replacement start on `node`."""
    move_rollout_worker(node, release, training)


def stop_store(release: Release, training: Training, node: str) -> None:
    """Make the weight store unavailable for STORE_OUTAGE_S seconds."""
    store_deployment = f"deployment/{release.name}-store"
    kubectl("-n", release.namespace, "scale", store_deployment, "--replicas=0")
    time.sleep(STORE_OUTAGE_S)
    kubectl("-n", release.namespace, "scale", store_deployment, "--replicas=1")
    release.wait_until_ready()


def roll_out_environment_image(release: Release, training: Training, node: str) -> None:
    """Replace each environment server after its sessions have ended."""
    deployment = f"deployment/{release.name}-env-blackjack"
    kubectl("-n", release.namespace, "rollout", "restart", deployment)
    release.wait_until_ready()


def drain_node(release: Release, training: Training, node: str) -> None:
    """Drain a node, and check that the rollout worker has left the node."""
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")
    kubectl("drain", node, *options)
    assert training.find_node("rollout") != node
    kubectl("uncordon", node)


def kill_node(release: Release, training: Training, node: str) -> None:
    """Power off a node with a server and the rollout worker, and mark the node with a taint.

    Without the taint, KubeRay waits for the dead worker until the node returns.
    """
    if NODE_KILL_VARIABLE not in os.environ:
        sys.stderr.write(f"SKIPPED, NOT PASSED: {NODE_KILL_VARIABLE} is not set\n")
        return
    with cordon(list_other_nodes(node)):
        delete_pod(release, list_server_pods(release)[0], immediately=True)
        move_rollout_worker(node, release, training)
        release.wait_until_ready()
    run_power_command(NODE_KILL_VARIABLE, node)
    try:
        wait_until(lambda: not is_ready(node), "the node to become unready")
        with mark_powered_off(node):
            wait_until(
                lambda: training.find_node("rollout") != node,
                "a new rollout worker",
                STALL_TIMEOUT_S,
            )
            training.wait_for_steps()
    finally:
        run_power_command(NODE_START_VARIABLE, node)


def kill_head(release: Release, training: Training, node: str) -> None:
    """Kill the pod of the driver; a retry resumes from the checkpoint."""
    delete_pod(release, training.find_pod("head"), immediately=True)


FAULTS = (
    kill_environment_server,
    evict_environment_server,
    kill_gateway,
    kill_rollout_worker,
    drain_node,
    roll_out_environment_image,
    kill_node,
    stop_store,
    kill_head,
)


# Tests.


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    with install([CHART / "values-cpu.yaml"]) as release:
        yield release


@pytest.fixture(autouse=True)
def end_runs_after_test(release: Release) -> Iterator[None]:
    yield
    end_runs(release)


def test_run_survives_all_faults_and_learns(release: Release, tmp_path: Path) -> None:
    summary = run_with_faults(FAULTS, release, tmp_path / "results", CHECKPOINT_SETTING.format(10))
    assert summary.gap_closed is not None and summary.gap_closed >= 0.90


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_run_survives_one_fault(fault: Fault, release: Release, tmp_path: Path) -> None:
    if fault is kill_node and NODE_KILL_VARIABLE not in os.environ:
        pytest.skip(f"SKIPPED, NOT PASSED: {NODE_KILL_VARIABLE} is not set")
    name = fault.__name__.replace("_", "-")
    # 100 steps take longer than a drain or a rollout.
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
    """Inject the faults into a run, check its step and episode counts, and return its summary."""
    nodes = kubectl("get", "nodes", "-o", "name").split()
    assert len(nodes) >= 2, "the test needs two nodes, because it stops one"
    node = nodes[-1].removeprefix("node/")
    with cordon([node]), submit(release, folder, *settings) as training:
        # The cordon keeps the head and the learner off the node that fails.
        training.wait_for_steps(1)
        kubectl("uncordon", node)
        for fault in faults:
            report_progress(training, fault)
            fault(release, training, node)
            training.wait_for_steps()
        report_progress(training, "all faults injected")
        summary = training.finish()
    assert summary.finished
    assert summary.canary_failures == 0
    steps = [row.step for row in training.rows if row.kind == "train"]
    assert steps == list(range(1, summary.num_steps + 1)), f"steps are missing or repeated: {steps}"
    num_played = sum(row.values["num_episodes"] for row in training.rows if row.kind == "train")
    assert summary.games_played == num_played
    assert summary.games_trained <= summary.games_played - summary.episodes_lost
    return summary


# Helpers of the faults.


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
    """Delete a pod, without a grace period if `immediately` is true."""
    options = ("--grace-period=0", "--force") if immediately else ()
    kubectl("-n", release.namespace, "delete", "pod", pod, "--wait=false", *options)


def evict_pod(release: Release, pod: str) -> None:
    """Evict a pod as `kubectl drain` does; raise AssertionError if the eviction is refused."""
    path = f"/api/v1/namespaces/{release.namespace}/pods/{pod}/eviction"
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": release.namespace},
    }
    kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def move_rollout_worker(node: str, release: Release, training: Training) -> None:
    """Kill the rollout worker, and let its replacement start on `node`."""
    with cordon(list_other_nodes(node)):
        previous_pod = training.find_pod("rollout")
        delete_pod(release, previous_pod, immediately=True)
        wait_until(
            lambda: training.find_pod("rollout") != previous_pod,
            "a new rollout worker",
            STALL_TIMEOUT_S,
        )
    assert training.find_node("rollout") == node


def list_other_nodes(node: str) -> list[str]:
    """Return the names of all nodes except `node`."""
    names = kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split()
    return [name for name in names if name != node]


def is_ready(node: str) -> bool:
    """Return True if the node has the condition Ready."""
    status_path = '{.status.conditions[?(@.type=="Ready")].status}'
    return kubectl("get", "node", node, "-o", f"jsonpath={status_path}") == "True"


@contextmanager
def cordon(nodes: list[str]) -> Iterator[None]:
    """Keep new pods off the nodes until the context exits."""
    try:
        for node in nodes:
            kubectl("cordon", node)
        yield
    finally:
        for node in nodes:
            kubectl("uncordon", node)


@contextmanager
def mark_powered_off(node: str) -> Iterator[None]:
    """Taint a node as powered off, so that Kubernetes deletes its pods at once."""
    kubectl("taint", "node", node, OUT_OF_SERVICE_TAINT)
    try:
        yield
    finally:
        kubectl("taint", "node", node, f"{OUT_OF_SERVICE_TAINT}-")


def run_power_command(variable: str, node: str) -> None:
    """Run the command in an environment variable with the node's name as last argument."""
    subprocess.run([*shlex.split(os.environ[variable]), node], check=True)
