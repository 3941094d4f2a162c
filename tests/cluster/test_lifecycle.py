"""Upgrade, rollback and uninstall while sessions are played through the gateway."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import player
from tests.cluster.client_pod import client_pod
from tests.cluster.installed import CHART, Installed, helm, installed, kubectl, until, why_not

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
LONGEST_SESSION_S = 10.0
NUM_PLAYERS = 24
SETTINGS = {
    # Longer than the longest session: no drain has to cut one.
    "gateway.drainSeconds": "20",
    "environments.blackjack.drainSeconds": "20",
    "storage.runs.keep": "true",
}
ROLLED = {
    f"{part}.podAnnotations.example\\.com/edition": "second"
    for part in ("gateway", "environments.blackjack")
}
LEFT = {
    "secret/ludus-auth",
    "secret/ludus-s3",
    "persistentvolumeclaim/ludus-runs",
    # Of every namespace.
    "configmap/kube-root-ca.crt",
    "serviceaccount/default",
}


def result(inside: tuple[str, ...]) -> list[dict[str, Any]]:
    """End the play in the pod; what became of each session."""
    kubectl(*inside, "touch", str(player.STOP))
    found = f"while [ ! -e {player.RESULT} ]; do sleep 0.2; done; cat {player.RESULT}"
    played: list[dict[str, Any]] = json.loads(kubectl(*inside, "timeout", "60", "sh", "-c", found))
    return played


@pytest.fixture(scope="module")
def release() -> Iterator[Installed]:
    with installed([CHART / "values-cpu.yaml"], SETTINGS) as found:
        yield found


def pods(release: Installed, component: str) -> set[str]:
    """Names of the pods of a part, those that are on their way out, too."""
    label = f"app.kubernetes.io/component={component}"
    return {pod["metadata"]["name"] for pod in release.get("pods", "-l", label)["items"]}


def everything(release: Installed) -> set[str]:
    """All that is in the namespace but events, which end by themselves."""
    kinds = kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    kinds = [kind for kind in kinds if not kind.startswith(("events", "pods.metrics"))]
    return set(kubectl("-n", release.namespace, "get", ",".join(kinds), "-o", "name").split())


def roll(release: Installed, change: Callable[[], object]) -> None:
    """Make a change that replaces every gateway and environment pod; return once it has."""
    before = {part: pods(release, part) for part in ("gateway", "environment")}
    change()
    release.wait_until_ready()
    for part, old in before.items():
        until(lambda part=part, old=old: not pods(release, part) & old, f"the old {part} pods' end")


def test_upgrade_and_rollback_lose_no_session(release: Installed) -> None:
    values, program = [CHART / "values-cpu.yaml"], Path(player.__file__)
    words = (str(NUM_PLAYERS), str(LONGEST_SESSION_S))
    with client_pod(release, "blackjack", program, *words) as inside:
        roll(release, lambda: release.upgrade(values, SETTINGS | ROLLED))
        roll(release, lambda: helm("rollback", release.name, "1", "-n", release.namespace))
        played = result(inside)
    lost = [session["lost"] for session in played if session["lost"]]
    slowest = max(session["slowest_s"] for session in played)
    sys.stdout.write(f"\n{len(played)} sessions, {len(lost)} lost, slowest call {slowest:.1f} s\n")
    assert not lost, lost[:3]
    assert len(played) > NUM_PLAYERS


def test_uninstall_leaves_what_is_not_the_releases(release: Installed) -> None:
    helm("uninstall", release.name, "--namespace", release.namespace)
    until(lambda: everything(release) <= LEFT, "everything of the release to be gone")
    assert everything(release) == LEFT
