"""Everything dies once while a run trains: it ends well, has learned, and counts what it lost.

Two commands, to which a node's name is added, let a node's power fail and come back:
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
from tests.cluster.installed import CHART, Installed, installed, kubectl, until, why_not
from tests.cluster.training import STALL_S, Training, end_runs, submitted

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
STORE_AWAY_S = 30.0
CHECKPOINTS = "training.checkpoint_every_steps={}"
NODE_KILL, NODE_START = "LUDUS_NODE_KILL", "LUDUS_NODE_START"
Fault = Callable[[Installed, Training, str], None]
OFF = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"


def say(training: Training, what: Fault | str) -> None:
    """Tell whoever watches how far the test is."""
    name = what if isinstance(what, str) else what.__name__.replace("_", " ")
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} step {training.step}: {name}\n")


def environment_server_killed(release: Installed, training: Training, victim: str) -> None:
    """A server's pod is gone at once, with all sessions."""
    delete(release, environment_pods(release)[0], now=True)


def environment_server_evicted(release: Installed, training: Training, victim: str) -> None:
    """One server may be evicted; the other not before the first has a successor."""
    until(lambda: len(environment_pods(release)) == 2, "two servers that are ready")
    first, second = environment_pods(release)
    evict(release, first)
    with pytest.raises(AssertionError, match="disruption budget"):
        evict(release, second)


def gateway_killed(release: Installed, training: Training, victim: str) -> None:
    """One of two gateways is gone at once."""
    delete(release, ready_pods(release, "gateway")[0], now=True)


def rollout_worker_killed(release: Installed, training: Training, victim: str) -> None:
    """The only rollout worker is gone at once; its successor is on the node that goes next."""
    move_to(victim, release, training)


def store_away(release: Installed, training: Training, victim: str) -> None:
    """No weights can be written or read for a while."""
    store = f"deployment/{release.name}-store"
    kubectl("-n", release.namespace, "scale", store, "--replicas=0")
    time.sleep(STORE_AWAY_S)
    kubectl("-n", release.namespace, "scale", store, "--replicas=1")
    release.wait_until_ready()


def environment_image_rolled_out(release: Installed, training: Training, victim: str) -> None:
    """Every server is replaced, each after it has ended its sessions."""
    servers = f"deployment/{release.name}-env-blackjack"
    kubectl("-n", release.namespace, "rollout", "restart", servers)
    release.wait_until_ready()


def node_drained(release: Installed, training: Training, victim: str) -> None:
    """A node is emptied for maintenance."""
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")
    kubectl("drain", victim, *options)
    assert training.node_of("rollout") != victim
    kubectl("uncordon", victim)


def node_killed(release: Installed, training: Training, victim: str) -> None:
    """The power of a node with a server and the rollout worker fails, and somebody says so.

    Without the taint, KubeRay waits for the dead worker until the node is back.
    """
    if NODE_KILL not in os.environ:
        sys.stderr.write(f"SKIPPED, NOT PASSED: {NODE_KILL} does not say how a node is killed\n")
        return
    with cordoned(others_than(victim)):
        delete(release, environment_pods(release)[0], now=True)
        move_to(victim, release, training)
        release.wait_until_ready()
    power(NODE_KILL, victim)
    try:
        until(lambda: not is_ready(victim), "the node to be missed")
        with off(victim):
            until(lambda: training.node_of("rollout") != victim, "another rollout worker", STALL_S)
            training.go_on()
    finally:
        power(NODE_START, victim)


def head_killed(release: Installed, training: Training, victim: str) -> None:
    """The driver is gone at once; a retry continues from the checkpoint."""
    delete(release, training.pod_of("head"), now=True)


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


# What must hold.


@pytest.fixture(scope="module")
def release() -> Iterator[Installed]:
    with installed([CHART / "values-cpu.yaml"]) as found:
        yield found


@pytest.fixture(autouse=True)
def no_run_afterwards(release: Installed) -> Iterator[None]:
    yield
    end_runs(release)


def test_a_run_in_which_everything_dies_ends_well_and_has_learned(
    release: Installed, tmp_path: Path
) -> None:
    summary = run_through(FAULTS, release, tmp_path / "results", CHECKPOINTS.format(10))
    assert summary.gap_closed is not None and summary.gap_closed >= 0.90


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_run_in_which_one_thing_dies_ends_well(
    fault: Fault, release: Installed, tmp_path: Path
) -> None:
    if fault is node_killed and NODE_KILL not in os.environ:
        pytest.skip(f"SKIPPED, NOT PASSED: {NODE_KILL} does not say how a node is killed")
    name = fault.__name__.replace("_", "-")
    # Long enough for what a drain or a roll-out takes.
    short = (f"name={name}", "training.num_steps=100", "eval.num_games=200", CHECKPOINTS.format(2))
    run_through([fault], release, tmp_path / "results", *short)


def run_through(
    faults: Iterable[Fault], release: Installed, folder: Path, *settings: str
) -> Summary:
    """What a run came to in which all of this happened; each step and each episode counts once."""
    nodes = kubectl("get", "nodes", "-o", "name").split()
    assert len(nodes) >= 2, "one node is to go away while another goes on"
    victim = nodes[-1].removeprefix("node/")
    with cordoned([victim]), submitted(release, folder, *settings) as training:
        # Head and learner are on nodes that stay.
        training.go_on(1)
        kubectl("uncordon", victim)
        for fault in faults:
            say(training, fault)
            fault(release, training, victim)
            training.go_on()
        say(training, "no more faults")
        summary = training.finish()
    assert summary.finished
    assert summary.canary_failures == 0
    steps = [row.step for row in training.rows if row.kind == "train"]
    assert steps == list(range(1, summary.num_steps + 1)), "each step is there once"
    played = sum(row.values["num_episodes"] for row in training.rows if row.kind == "train")
    assert summary.games_played == played
    assert summary.games_trained <= summary.games_played - summary.episodes_lost
    return summary


# What a fault is made of.


def ready_pods(release: Installed, component: str) -> list[str]:
    """Names of the pods of a part that are ready and not about to end."""
    label = f"app.kubernetes.io/component={component}"
    return [
        pod["metadata"]["name"]
        for pod in release.get("pods", "-l", label)["items"]
        if "deletionTimestamp" not in pod["metadata"]
        and {"type": "Ready", "status": "True"}.items()
        <= next(c for c in pod["status"]["conditions"] if c["type"] == "Ready").items()
    ]


def environment_pods(release: Installed) -> list[str]:
    """Names of the servers that are ready."""
    return ready_pods(release, "environment")


def delete(release: Installed, pod: str, *, now: bool) -> None:
    """Delete a pod; now: as if it had been killed."""
    options = ("--grace-period=0", "--force") if now else ()
    kubectl("-n", release.namespace, "delete", "pod", pod, "--wait=false", *options)


def evict(release: Installed, pod: str) -> None:
    """Evict a pod as `kubectl drain` does; a refusal is the error."""
    path = f"/api/v1/namespaces/{release.namespace}/pods/{pod}/eviction"
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": release.namespace},
    }
    kubectl("create", "--raw", path, "-f", "-", given=json.dumps(body))


def move_to(node: str, release: Installed, training: Training) -> None:
    """Kill the rollout worker; the next one starts on that node."""
    with cordoned(others_than(node)):
        before = training.pod_of("rollout")
        delete(release, before, now=True)
        until(lambda: training.pod_of("rollout") != before, "another rollout worker", STALL_S)
    assert training.node_of("rollout") == node


def others_than(node: str) -> list[str]:
    """Names of the other nodes."""
    names = kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split()
    return [name for name in names if name != node]


def is_ready(node: str) -> bool:
    """Whether the node says that it is."""
    ready = '{.status.conditions[?(@.type=="Ready")].status}'
    return kubectl("get", "node", node, "-o", f"jsonpath={ready}") == "True"


@contextmanager
def cordoned(nodes: list[str]) -> Iterator[None]:
    """No pod is placed on these nodes meanwhile."""
    try:
        for node in nodes:
            kubectl("cordon", node)
        yield
    finally:
        for node in nodes:
            kubectl("uncordon", node)


@contextmanager
def off(node: str) -> Iterator[None]:
    """Its pods are given up at once, which nothing else does while the node is silent."""
    kubectl("taint", "node", node, OFF)
    try:
        yield
    finally:
        kubectl("taint", "node", node, f"{OFF}-")


def power(variable: str, node: str) -> None:
    """Run the command of that variable for a node."""
    subprocess.run([*shlex.split(os.environ[variable]), node], check=True)
