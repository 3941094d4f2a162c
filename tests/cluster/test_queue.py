"""Runs that share a quota of a real Kueue installation."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.installed import (
    CHART,
    Release,
    create_object,
    find_skip_reason,
    install,
    kubectl,
    wait_until,
)
from tests.cluster.training import submit

KUEUE_API = "kueue.x-k8s.io/v1beta1"
QUEUE = "runs"
SHORT_RUN = ("training.num_steps=4", "training.groups_per_step=64", "eval.num_games=200")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]


def test_queued_run_waits_until_the_previous_run_ends(tmp_path: Path) -> None:
    if "clusterqueues" not in kubectl("api-resources", "--api-group=kueue.x-k8s.io"):
        pytest.skip("SKIPPED, NOT PASSED: Kueue is not installed")
    settings = {"runs.queue.name": QUEUE}
    with install([CHART / "values-cpu.yaml"], settings) as release, limit_quota_to_one_run(release):
        first_submission = submit(release, tmp_path / "first", "name=first", *SHORT_RUN)
        second_submission = submit(release, tmp_path / "second", "name=second", *SHORT_RUN)
        with first_submission as first_run:
            wait_until(lambda: first_run.find_pods(), "the first run's pods")
            with second_submission as second_run:
                wait_until(
                    lambda: f"waits in queue '{QUEUE}'" in second_run.output,
                    "the second run to wait",
                )
                clusters = {
                    pod["metadata"]["labels"]["ray.io/cluster"]
                    for pod in release.get("pods", "-l", "ray.io/cluster")["items"]
                }
                assert len(clusters) == 1
                assert first_run.finish().finished
                assert second_run.finish().finished


@contextmanager
def limit_quota_to_one_run(release: Release) -> Iterator[None]:
    """Create a queue whose quota is enough for one run but not for two."""
    name = f"ludus-test-{secrets.token_hex(3)}"
    quota = {"cpu": "1", "memory": "8Gi"}
    resources = [{"name": resource, "nominalQuota": amount} for resource, amount in quota.items()]
    flavors = [{"name": name, "resources": resources}]
    resource_group = {"coveredResources": list(quota), "flavors": flavors}
    cluster_queue = {"namespaceSelector": {}, "resourceGroups": [resource_group]}
    create_object(KUEUE_API, "ResourceFlavor", name)
    create_object(KUEUE_API, "ClusterQueue", name, spec=cluster_queue)
    create_object(KUEUE_API, "LocalQueue", QUEUE, release.namespace, spec={"clusterQueue": name})
    try:
        yield
    finally:
        kubectl("-n", release.namespace, "delete", "localqueue", QUEUE)
        kubectl("delete", "clusterqueue,resourceflavor", name, "--wait=false")
