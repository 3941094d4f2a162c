"""The chart on a real cluster, as values-cpu.yaml says, under Pod Security `restricted`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.installed import CHART, Installed, helm, installed, why_not

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture(scope="module")
def release() -> Iterator[Installed]:
    with installed([CHART / "values-cpu.yaml"]) as found:
        yield found


def restarts(release: Installed) -> dict[str, int]:
    """By pod, how often its containers were started again."""
    return {
        pod["metadata"]["name"]: sum(c["restartCount"] for c in pod["status"]["containerStatuses"])
        for pod in release.get("pods")["items"]
    }


def test_every_pod_is_ready_and_none_was_started_twice(release: Installed) -> None:
    pods = release.get("pods")["items"]
    parts = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods}
    assert parts == {"gateway", "environment", "store"}
    for pod in pods:
        ready = {c["type"]: c["status"] for c in pod["status"]["conditions"]}
        assert ready["Ready"] == "True", pod["metadata"]["name"]
    assert set(restarts(release).values()) == {0}
    assert release.get("networkpolicies")["items"]


def test_the_charts_own_test_plays_through_the_gateway(release: Installed) -> None:
    said = helm("test", release.name, "--namespace", release.namespace, "--timeout", "180s")
    assert "Succeeded" in said
    assert "Failed" not in said
