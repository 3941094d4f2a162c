"""Installation with values-cpu.yaml on a real cluster, under Pod Security `restricted`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.installed import CHART, Release, find_skip_reason, helm, install

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    with install([CHART / "values-cpu.yaml"]) as release:
        yield release


def count_restarts(release: Release) -> dict[str, int]:
    """Return the number of container restarts of each pod."""
    return {
        pod["metadata"]["name"]: sum(
            status["restartCount"] for status in pod["status"]["containerStatuses"]
        )
        for pod in release.get("pods")["items"]
    }


def test_every_pod_is_ready_without_restarts(release: Release) -> None:
    pods = release.get("pods")["items"]
    components = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods}
    assert components == {"gateway", "environment", "store"}
    for pod in pods:
        conditions = {
            condition["type"]: condition["status"] for condition in pod["status"]["conditions"]
        }
        assert conditions["Ready"] == "True", pod["metadata"]["name"]
    assert set(count_restarts(release).values()) == {0}
    assert release.get("networkpolicies")["items"]


def test_helm_test_plays_through_the_gateway(release: Release) -> None:
    output = helm("test", release.name, "--namespace", release.namespace, "--timeout", "180s")
    assert "Succeeded" in output
    assert "Failed" not in output
