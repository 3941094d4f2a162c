"""Upgrade, rollback and uninstall while sessions are open through the gateway."""

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
LONGEST_SESSION_S = 10.0
NUM_PLAYERS = 24
SETTINGS = {
    # Longer than the longest session, so that no drain cuts off a session.
    "gateway.drainSeconds": "20",
    "environments.blackjack.drainSeconds": "20",
    "storage.runs.keep": "true",
}
ROLLED = {
    f"{part}.podAnnotations.example\\.com/edition": "second"
    for part in ("gateway", "environments.blackjack")
}
REMAINING_OBJECTS = {
    "secret/ludus-auth",
    "secret/ludus-s3",
    "persistentvolumeclaim/ludus-runs",
    # Objects of every namespace.
    "configmap/kube-root-ca.crt",
    "serviceaccount/default",
}


def read_sessions(inside: tuple[str, ...]) -> list[dict[str, Any]]:
    """Stop the players in the pod; return the result of each session."""
    kubectl(*inside, "touch", str(player.STOP))
    read_result = f"while [ ! -e {player.RESULT} ]; do sleep 0.2; done; cat {player.RESULT}"
    played: list[dict[str, Any]] = json.loads(
        kubectl(*inside, "timeout", "60", "sh", "-c", read_result)
    )
    return played


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    with install([CHART / "values-cpu.yaml"], SETTINGS) as release:
        yield release


def pods(release: Release, component: str) -> set[str]:
    """Return the names of a component's pods, including terminating pods."""
    label = f"app.kubernetes.io/component={component}"
    return {pod["metadata"]["name"] for pod in release.get("pods", "-l", label)["items"]}


def object_names(release: Release) -> set[str]:
    """Return all objects of the namespace except events, which expire automatically."""
    kinds = kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    kinds = [kind for kind in kinds if not kind.startswith(("events", "pods.metrics"))]
    return set(kubectl("-n", release.namespace, "get", ",".join(kinds), "-o", "name").split())


def replace_pods(release: Release, change: Callable[[], object]) -> None:
    """Make a change, and wait until it has replaced every gateway and environment pod."""
    previous_pods = {part: pods(release, part) for part in ("gateway", "environment")}
    change()
    release.wait_until_ready()
    for part, old in previous_pods.items():
        wait_until(
            lambda part=part, old=old: not pods(release, part) & old, f"the old {part} pods' end"
        )


def test_upgrade_and_rollback_lose_no_session(release: Release) -> None:
    values, program = [CHART / "values-cpu.yaml"], Path(player.__file__)
    words = (str(NUM_PLAYERS), str(LONGEST_SESSION_S))
    with run_client_pod(release, "blackjack", program, *words) as inside:
        replace_pods(release, lambda: release.upgrade(values, SETTINGS | ROLLED))
        replace_pods(release, lambda: helm("rollback", release.name, "1", "-n", release.namespace))
        played = read_sessions(inside)
    errors = [session["lost"] for session in played if session["lost"]]
    slowest = max(session["slowest_s"] for session in played)
    sys.stdout.write(
        f"\n{len(played)} sessions, {len(errors)} lost, slowest call {slowest:.1f} s\n"
    )
    assert not errors, errors[:3]
    assert len(played) > NUM_PLAYERS


def test_uninstall_keeps_objects_outside_the_release(release: Release) -> None:
    helm("uninstall", release.name, "--namespace", release.namespace)
    wait_until(
        lambda: object_names(release) <= REMAINING_OBJECTS, "everything of the release to be gone"
    )
    assert object_names(release) == REMAINING_OBJECTS
