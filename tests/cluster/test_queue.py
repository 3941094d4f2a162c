"""Runs that share a quota, through the real Kueue."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.installed import CHART, Installed, create, installed, kubectl, until, why_not
from tests.cluster.training import submitted

KUEUE = "kueue.x-k8s.io/v1beta1"
QUEUE = "runs"
SHORT = ("training.num_steps=4", "training.groups_per_step=64", "eval.num_games=200")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def test_a_run_waits_in_its_queue_until_another_has_ended(tmp_path: Path) -> None:
    if "clusterqueues" not in kubectl("api-resources", "--api-group=kueue.x-k8s.io"):
        pytest.skip("SKIPPED, NOT PASSED: Kueue is not installed")
    settings = {"runs.queue.name": QUEUE}
    with installed([CHART / "values-cpu.yaml"], settings) as release, room_for_one_run(release):
        first_one = submitted(release, tmp_path / "first", "name=first", *SHORT)
        second_one = submitted(release, tmp_path / "second", "name=second", *SHORT)
        with first_one as first:
            until(lambda: first.pods(), "the first run's pods")
            with second_one as second:
                until(lambda: f"waits in queue '{QUEUE}'" in second.said, "the second to wait")
                clusters = {
                    pod["metadata"]["labels"]["ray.io/cluster"]
                    for pod in release.get("pods", "-l", "ray.io/cluster")["items"]
                }
                assert len(clusters) == 1
                assert first.finish().finished
                assert second.finish().finished


@contextmanager
def room_for_one_run(release: Installed) -> Iterator[None]:
    """A queue of the release's namespace whose quota two runs together exceed."""
    name = f"ludus-test-{secrets.token_hex(3)}"
    quota = {"cpu": "1", "memory": "8Gi"}
    resources = [{"name": kind, "nominalQuota": amount} for kind, amount in quota.items()]
    flavors = [{"name": name, "resources": resources}]
    group = {"coveredResources": list(quota), "flavors": flavors}
    cluster_queue = {"namespaceSelector": {}, "resourceGroups": [group]}
    create(KUEUE, "ResourceFlavor", name)
    create(KUEUE, "ClusterQueue", name, spec=cluster_queue)
    create(KUEUE, "LocalQueue", QUEUE, release.namespace, spec={"clusterQueue": name})
    try:
        yield
    finally:
        kubectl("-n", release.namespace, "delete", "localqueue", QUEUE)
        kubectl("delete", "clusterqueue,resourceflavor", name, "--wait=false")
