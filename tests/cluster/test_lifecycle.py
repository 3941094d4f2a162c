"""Upgrade, rollback, scale-down and uninstall while sessions are open through the gateway."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import player
from tests.cluster.client_pod import run_client_pod
from tests.cluster.installed import (
    CHART,
    Release,
    find_skip_reason,
    helm,
    install,
    kubectl,
    wait_until,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]
MAX_SESSION_S = 10.0
NUM_PLAYERS = 30
MAX_OPEN_S = 2.0
"""Limit of the time to open a session, whatever happens to the gateways."""
SETTINGS = {
    # The drain is longer than any session, so it cuts off no session.
    "gateway.drainSeconds": "20",
    "environments.blackjack.drainSeconds": "20",
    "storage.runs.keep": "true",
}
ROLLOUT_SETTINGS = {
    f"{component}.podAnnotations.example\\.com/edition": "second"
    for component in ("gateway", "environments.blackjack")
}
REMAINING_OBJECTS = {
    "secret/ludus-auth",
    "secret/ludus-s3",
    "persistentvolumeclaim/ludus-runs",
    # Kubernetes creates these objects in every namespace.
    "configmap/kube-root-ca.crt",
    "serviceaccount/default",
}


def stop_players(exec_command: tuple[str, ...]) -> list[dict[str, Any]]:
    """Stop the players in the pod; return the result of each session."""
    kubectl(*exec_command, "touch", str(player.STOP_PATH))
    read_command = (
        f"while [ ! -e {player.RESULT_PATH} ]; do sleep 0.2; done; cat {player.RESULT_PATH}"
    )
    session_results: list[dict[str, Any]] = json.loads(
        kubectl(*exec_command, "timeout", "60", "sh", "-c", read_command)
    )
    return session_results


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    with install([CHART / "values-cpu.yaml"], SETTINGS) as release:
        yield release


def list_pods(release: Release, component: str) -> set[str]:
    """Return the names of a component's pods, including terminating pods."""
    label = f"app.kubernetes.io/component={component}"
    return {pod["metadata"]["name"] for pod in release.get("pods", "-l", label)["items"]}


def list_object_names(release: Release) -> set[str]:
    """Return the names of all objects of the namespace, except events and pod metrics."""
    kinds = kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    kinds = [kind for kind in kinds if not kind.startswith(("events", "pods.metrics"))]
    return set(kubectl("-n", release.namespace, "get", ",".join(kinds), "-o", "name").split())


def replace_pods(release: Release, change: Callable[[], object]) -> None:
    """Call `change`, and wait until every gateway and environment pod has been replaced."""
    previous_pods = {
        component: list_pods(release, component) for component in ("gateway", "environment")
    }
    change()
    release.wait_until_ready()
    for component, pod_names in previous_pods.items():
        wait_until(
            lambda component=component, pod_names=pod_names: (
                not list_pods(release, component) & pod_names
            ),
            f"the previous {component} pods to terminate",
        )


def remove_gateway(release: Release) -> None:
    """Scale the gateways from two to one, and wait until the removed one has terminated."""
    kubectl("-n", release.namespace, "scale", "deployment/ludus-gateway", "--replicas=1")
    wait_until(lambda: len(list_pods(release, "gateway")) == 1, "one gateway to terminate")


def test_upgrade_rollback_and_scale_down_delay_no_open_and_lose_no_session(
    release: Release,
) -> None:
    values, program = [CHART / "values-cpu.yaml"], Path(player.__file__)
    arguments = (str(NUM_PLAYERS), str(MAX_SESSION_S))
    with run_client_pod(release, "blackjack", program, *arguments) as exec_command:
        replace_pods(release, lambda: release.upgrade(values, SETTINGS | ROLLOUT_SETTINGS))
        replace_pods(release, lambda: helm("rollback", release.name, "1", "-n", release.namespace))
        remove_gateway(release)
        session_results = stop_players(exec_command)
    errors = [session["lost"] for session in session_results if session["lost"]]
    max_open_s = max(session["open_s"] for session in session_results)
    max_call_s = max(session["slowest_s"] for session in session_results)
    sys.stdout.write(
        f"\n{len(session_results)} sessions, {len(errors)} lost, slowest open {max_open_s:.2f} s, "
        f"slowest call {max_call_s:.2f} s\n"
    )
    assert not errors, errors[:3]
    assert max_open_s <= MAX_OPEN_S
    assert len(session_results) > NUM_PLAYERS


def test_uninstall_keeps_objects_outside_the_release(release: Release) -> None:
    helm("uninstall", release.name, "--namespace", release.namespace)
    wait_until(
        lambda: list_object_names(release) <= REMAINING_OBJECTS,
        "the release's objects to be deleted",
    )
    assert list_object_names(release) == REMAINING_OBJECTS
