"""What would keep a run from beginning is said before it is submitted, with the way out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from ludus.proto.errors import ConfigError
from ludus.services.runs.cluster import RunsCluster
from ludus.services.runs.cluster_checks import ClusterFindings, check_cluster
from ludus.services.runs.manifest import RunManifests, make_manifests
from tests.gateway.cluster_objects import make_api_client
from tests.gateway.fake_kubernetes import FakeKubernetes
from tests.runs.cluster import claim, install, node, secret
from tests.runs.release import NAMESPACE, Json, manifests, ray_job, release, run_config

KUEUE = "kueue.x-k8s.io"


@pytest.fixture
async def cluster() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes() as cluster:
        install(cluster)
        yield cluster


async def found_in(
    cluster: FakeKubernetes, made: RunManifests | None = None, *ignored: str
) -> ClusterFindings:
    async with make_api_client(cluster) as api:
        return await check_cluster(RunsCluster(api, NAMESPACE), made or manifests(), ignored)


async def problem_in(cluster: FakeKubernetes, made: RunManifests | None = None) -> str:
    """The only problem."""
    (problem,) = (await found_in(cluster, made)).problems
    return problem


def with_gpus(group: str, number: int, **run: Any) -> RunManifests:
    """A run whose pods of a group ask for GPUs."""
    job = ray_job()
    for one in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        if one["groupName"] == group:
            resources = one["template"]["spec"]["containers"][0]["resources"]
            for part in ("requests", "limits"):
                resources[part] = {**resources[part], "nvidia.com/gpu": str(number)}
    return manifests(job, **run)


async def test_a_cluster_that_has_everything_is_found_good(cluster: FakeKubernetes) -> None:
    found = await found_in(cluster)
    assert (found.problems, found.notes) == ([], [])
    found.raise_if_any()
    assert cluster.get("ray.io/v1", "rayjobs", NAMESPACE, "demo") is None  # asked, not made


async def test_without_the_operator_it_is_all_that_is_said(cluster: FakeKubernetes) -> None:
    cluster.groups.clear()
    cluster.remove("v1", "secrets", NAMESPACE, "ludus-auth")
    said = await problem_in(cluster)
    assert "the KubeRay operator is not installed; install it with: helm install kuberay" in said


async def test_several_problems_are_told_at_once(cluster: FakeKubernetes) -> None:
    cluster.remove("v1", "secrets", NAMESPACE, "ludus-auth")
    found = await found_in(cluster, manifests(name="Demo"))
    with pytest.raises(ConfigError, match="2 problems prevent the run:\n  name = 'Demo'"):
        found.raise_if_any()


async def test_a_model_of_this_machine_is_not_there(cluster: FakeKubernetes) -> None:
    made = manifests(model={"kind": "pretrained", "path": "./models/mine"})
    assert "'./models/mine' is a folder of this machine" in await problem_in(cluster, made)
    there = manifests(model={"kind": "pretrained", "path": "/runs/models/mine"})
    assert (await found_in(cluster, there)).problems == []


# Secrets and volumes.


async def test_a_missing_secret_is_named_with_the_command_that_makes_it(
    cluster: FakeKubernetes,
) -> None:
    cluster.remove("v1", "secrets", NAMESPACE, "ludus-auth")
    assert await problem_in(cluster) == (
        "there is no Secret 'ludus-auth' in namespace 'arena'; create it with: kubectl -n arena "
        "create secret generic ludus-auth --from-literal=gateway-token=..."
    )


async def test_a_secret_without_its_key_is_named(cluster: FakeKubernetes) -> None:
    cluster.put(secret("ludus-auth", "another"))
    assert "Secret 'ludus-auth' has no key 'gateway-token'" in await problem_in(cluster)


async def test_a_missing_secret_for_images_is_named(cluster: FakeKubernetes) -> None:
    job = ray_job()
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    head["imagePullSecrets"] = [{"name": "registry"}]
    head["volumes"].append({"name": "ca", "secret": {"secretName": "ludus-tls"}})
    head["volumes"].append({"name": "no", "secret": {"secretName": "no", "optional": True}})
    said = (await found_in(cluster, manifests(job))).problems
    assert ["'registry'" in said[0], "'ludus-tls'" in said[1], len(said)] == [True, True, 2]


async def test_a_volume_that_is_missing_lost_or_read_only_is_named(
    cluster: FakeKubernetes,
) -> None:
    cluster.put(claim(mode="ReadOnlyMany"))
    assert "'ludus-runs' is read-only; a run needs ReadWriteMany" in await problem_in(cluster)
    cluster.put(claim(phase="Lost"))
    assert "'ludus-runs' has lost its volume" in await problem_in(cluster)
    cluster.remove("v1", "persistentvolumeclaims", NAMESPACE, "ludus-runs")
    assert "no PersistentVolumeClaim 'ludus-runs' in namespace" in await problem_in(cluster)


# Nodes and GPUs.


async def test_gpus_that_no_node_has_are_named(cluster: FakeKubernetes) -> None:
    made = with_gpus("learner", 8)
    said = await problem_in(cluster, made)
    assert "a learner pod requests 8 of nvidia.com/gpu, but no node that admits it has" in said
    assert "more than 0" in said and "--ignore nodes" in said
    assert (await found_in(cluster, made, "nodes")).problems == []


async def test_more_gpus_than_all_nodes_have_together_are_named(cluster: FakeKubernetes) -> None:
    cluster.put(node("gpu-1", **{"nvidia.com/gpu": "8"}))
    assert (await found_in(cluster, with_gpus("learner", 8))).problems == []
    made = with_gpus("learner", 8, learner={"num_ranks": 2})
    said = await problem_in(cluster, made)
    assert "the run starts with 16 nvidia.com/gpu, but the nodes have 8" in said


async def test_a_run_that_wants_gpus_of_pods_without_is_refused(cluster: FakeKubernetes) -> None:
    said = await problem_in(cluster, manifests(rollout={"num_gpus_per_worker": 1}))
    assert said.startswith("rollout.num_gpus_per_worker = 1, but the release's rollout pods have")


async def test_pods_that_no_node_lets_in_are_named(cluster: FakeKubernetes) -> None:
    job = ray_job()
    spec = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    spec["nodeSelector"] = {"pool": "gpu"}
    assert "no node with pool=gpu admits a learner pod" in await problem_in(cluster, manifests(job))
    tainted = node("gpu-1")
    tainted["metadata"]["labels"] = {"pool": "gpu"}
    tainted["spec"] = {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]}
    cluster.put(tainted)
    assert "no node with pool=gpu admits" in await problem_in(cluster, manifests(job))
    spec["tolerations"] = [{"key": "gpu", "operator": "Exists"}]
    assert (await found_in(cluster, manifests(job))).problems == []


async def test_pods_that_fit_on_no_single_node_are_named(cluster: FakeKubernetes) -> None:
    cluster.put(node("node-1", cpu="8", memory="500Mi"))
    cluster.put(node("node-2", cpu="500m", memory="32Gi"))
    said = (await found_in(cluster)).problems
    assert all("no node has all the resources it requests" in one for one in said)
    assert len(said) == 3


# Quotas and queues.


def quota(used: str, hard: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "team", "namespace": NAMESPACE},
        "spec": {"hard": {"requests.cpu": hard}},
        "status": {"hard": {"requests.cpu": hard}, "used": {"requests.cpu": used}},
    }


async def test_a_quota_that_is_too_small_or_used_up_is_told_with_its_numbers(
    cluster: FakeKubernetes,
) -> None:
    cluster.put(quota("0", "2"))
    said = await problem_in(cluster)
    assert "3.5 of requests.cpu, but quota 'team' allows 2; request a larger quota" in said
    cluster.put(quota("6500m", "8"))
    assert "quota 'team' has 1.5 left of 8; wait for other runs to end" in await problem_in(cluster)
    cluster.put(quota("1", "8"))
    assert (await found_in(cluster)).problems == []


def kueue(cluster: FakeKubernetes, cpu: str | None = "8") -> None:
    cluster.groups[f"/apis/{KUEUE}"] = {"preferredVersion": {"groupVersion": f"{KUEUE}/v1beta1"}}
    api, resources = f"{KUEUE}/v1beta1", [{"name": "cpu", "nominalQuota": cpu}]
    local = {"metadata": {"name": "team", "namespace": NAMESPACE}, "kind": "LocalQueue"}
    cluster.put({"apiVersion": api, **local, "spec": {"clusterQueue": "all"}})
    if cpu is not None:
        spec = {"resourceGroups": [{"flavors": [{"name": "any", "resources": resources}]}]}
        backing = {"metadata": {"name": "all", "namespace": ""}, "kind": "ClusterQueue"}
        cluster.put({"apiVersion": api, **backing, "spec": spec})


async def test_each_thing_that_a_queue_lacks_is_named(cluster: FakeKubernetes) -> None:
    made = make_manifests(run_config(), release(), queue="team")
    assert "uses queue 'team', but Kueue is not installed" in await problem_in(cluster, made)
    kueue(cluster, cpu=None)
    assert "uses ClusterQueue 'all', which does not exist" in await problem_in(cluster, made)
    kueue(cluster, cpu="2")
    said = await problem_in(cluster, made)
    assert "starts with 3.5 of cpu, but queue 'team' has 2 in total" in said
    kueue(cluster, cpu="8")
    assert (await found_in(cluster, made)).problems == []
    other = make_manifests(run_config(), release(), queue="other")
    assert "no LocalQueue 'other' in namespace 'arena'" in await problem_in(cluster, other)


async def test_a_run_in_a_queue_waits_for_a_quota_that_is_used_up(cluster: FakeKubernetes) -> None:
    cluster.put(quota("8", "8"))
    kueue(cluster)
    made = make_manifests(run_config(), release(), queue="team")
    assert (await found_in(cluster, made)).problems == []


# The API server's own judgement.


async def test_what_the_api_server_refuses_is_told_in_its_words(cluster: FakeKubernetes) -> None:
    cluster.fail(422, verb="create", plural="rayjobs")
    assert (await problem_in(cluster)).startswith("the API server refuses the RayJob: 422 ")
    cluster.fail(403, verb="create", plural="pods")
    said = await problem_in(cluster)
    assert said.startswith("the API server refuses the pod of container 'ray-head': 403 ")


async def test_what_may_not_be_looked_at_is_left_out_and_said(cluster: FakeKubernetes) -> None:
    cluster.fail(403, verb="list", plural="nodes")
    found = await found_in(cluster)
    assert found.problems == []
    (note,) = found.notes
    assert note.startswith("check 'nodes' is skipped: no permission")


async def test_an_unknown_check_is_refused_with_those_that_there_are(
    cluster: FakeKubernetes,
) -> None:
    with pytest.raises(ConfigError, match=r"must be one of operator, rules, .*, got 'all'"):
        await found_in(cluster, None, "all")
