"""Problems that would stop a run are reported with a remedy before the run is submitted."""

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
from tests.runs.cluster import install_release, make_node, make_secret, make_volume_claim
from tests.runs.release import (
    NAMESPACE,
    Json,
    build_manifests,
    make_ray_job_template,
    make_release,
    make_run_config,
)

KUEUE = "kueue.x-k8s.io"


@pytest.fixture
async def cluster() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes() as cluster:
        install_release(cluster)
        yield cluster


async def find_problems(
    cluster: FakeKubernetes, run_manifests: RunManifests | None = None, *ignored_checks: str
) -> ClusterFindings:
    async with make_api_client(cluster) as api:
        return await check_cluster(
            RunsCluster(api, NAMESPACE), run_manifests or build_manifests(), ignored_checks
        )


async def find_single_problem(
    cluster: FakeKubernetes, run_manifests: RunManifests | None = None
) -> str:
    """Return the only problem."""
    (problem,) = (await find_problems(cluster, run_manifests)).problems
    return problem


def request_gpus(group: str, num_gpus: int, **run: Any) -> RunManifests:
    """Return a run in which the pods of a group request GPUs."""
    job = make_ray_job_template()
    for worker_group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        if worker_group["groupName"] == group:
            resources = worker_group["template"]["spec"]["containers"][0]["resources"]
            for part in ("requests", "limits"):
                resources[part] = {**resources[part], "nvidia.com/gpu": str(num_gpus)}
    return build_manifests(job, **run)


async def test_a_complete_cluster_has_no_problems(cluster: FakeKubernetes) -> None:
    findings = await find_problems(cluster)
    assert (findings.problems, findings.notes) == ([], [])
    findings.raise_problems()
    assert cluster.get("ray.io/v1", "rayjobs", NAMESPACE, "demo") is None  # checked, not created


async def test_missing_operator_is_the_only_reported_problem(cluster: FakeKubernetes) -> None:
    cluster.groups.clear()
    cluster.remove("v1", "secrets", NAMESPACE, "ludus-auth")
    message = await find_single_problem(cluster)
    assert "the KubeRay operator is not installed; install it with: helm install kuberay" in message


async def test_several_problems_are_reported_at_once(cluster: FakeKubernetes) -> None:
    cluster.remove("v1", "secrets", NAMESPACE, "ludus-auth")
    findings = await find_problems(cluster, build_manifests(name="Demo"))
    with pytest.raises(ConfigError, match="2 problems prevent the run:\n  name = 'Demo'"):
        findings.raise_problems()


async def test_a_local_model_folder_is_refused(cluster: FakeKubernetes) -> None:
    run_manifests = build_manifests(model={"kind": "pretrained", "path": "./models/mine"})
    assert "'./models/mine' is a folder of this machine" in await find_single_problem(
        cluster, run_manifests
    )
    shared_model_run = build_manifests(model={"kind": "pretrained", "path": "/runs/models/mine"})
    assert (await find_problems(cluster, shared_model_run)).problems == []


# Secrets and volumes.


async def test_missing_secret_is_reported_with_the_command_to_create_it(
    cluster: FakeKubernetes,
) -> None:
    cluster.remove("v1", "secrets", NAMESPACE, "ludus-auth")
    assert await find_single_problem(cluster) == (
        "there is no Secret 'ludus-auth' in namespace 'arena'; create it with: kubectl -n arena "
        "create secret generic ludus-auth --from-literal=gateway-token=..."
    )


async def test_secret_without_the_expected_key_is_reported(cluster: FakeKubernetes) -> None:
    cluster.put(make_secret("ludus-auth", "another"))
    assert "Secret 'ludus-auth' has no key 'gateway-token'" in await find_single_problem(cluster)


async def test_missing_image_pull_and_volume_secrets_are_reported(cluster: FakeKubernetes) -> None:
    job = make_ray_job_template()
    head_spec = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    head_spec["imagePullSecrets"] = [{"name": "registry"}]
    head_spec["volumes"].append({"name": "ca", "secret": {"secretName": "ludus-tls"}})
    head_spec["volumes"].append({"name": "no", "secret": {"secretName": "no", "optional": True}})
    problems = (await find_problems(cluster, build_manifests(job))).problems
    assert ["'registry'" in problems[0], "'ludus-tls'" in problems[1], len(problems)] == [
        True,
        True,
        2,
    ]


async def test_missing_lost_or_read_only_volume_is_reported(
    cluster: FakeKubernetes,
) -> None:
    cluster.put(make_volume_claim(mode="ReadOnlyMany"))
    assert "'ludus-runs' is read-only; a run needs ReadWriteMany" in await find_single_problem(
        cluster
    )
    cluster.put(make_volume_claim(phase="Lost"))
    assert "'ludus-runs' has lost its volume" in await find_single_problem(cluster)
    cluster.remove("v1", "persistentvolumeclaims", NAMESPACE, "ludus-runs")
    assert "no PersistentVolumeClaim 'ludus-runs' in namespace" in await find_single_problem(
        cluster
    )


# Nodes and GPUs.


async def test_gpus_absent_from_all_nodes_are_reported(cluster: FakeKubernetes) -> None:
    run_manifests = request_gpus("learner", 8)
    message = await find_single_problem(cluster, run_manifests)
    assert "a learner pod requests 8 of nvidia.com/gpu, but no node that admits it has" in message
    assert "more than 0" in message and "--ignore nodes" in message
    assert (await find_problems(cluster, run_manifests, "nodes")).problems == []


async def test_request_for_more_gpus_than_the_cluster_has_is_reported(
    cluster: FakeKubernetes,
) -> None:
    cluster.put(make_node("gpu-1", **{"nvidia.com/gpu": "8"}))
    assert (await find_problems(cluster, request_gpus("learner", 8))).problems == []
    run_manifests = request_gpus("learner", 8, learner={"num_ranks": 2})
    message = await find_single_problem(cluster, run_manifests)
    assert "the run starts with 16 nvidia.com/gpu, but the nodes have 8" in message


async def test_run_that_needs_gpus_in_pods_without_gpus_is_refused(cluster: FakeKubernetes) -> None:
    message = await find_single_problem(
        cluster, build_manifests(rollout={"num_gpus_per_worker": 1})
    )
    assert message.startswith(
        "rollout.num_gpus_per_worker = 1, but the release's rollout pods have"
    )


async def test_pods_that_no_node_admits_are_reported(cluster: FakeKubernetes) -> None:
    job = make_ray_job_template()
    spec = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    spec["nodeSelector"] = {"pool": "gpu"}
    assert "no node with pool=gpu admits a learner pod" in await find_single_problem(
        cluster, build_manifests(job)
    )
    tainted_node = make_node("gpu-1")
    tainted_node["metadata"]["labels"] = {"pool": "gpu"}
    tainted_node["spec"] = {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]}
    cluster.put(tainted_node)
    assert "no node with pool=gpu admits" in await find_single_problem(
        cluster, build_manifests(job)
    )
    spec["tolerations"] = [{"key": "gpu", "operator": "Exists"}]
    assert (await find_problems(cluster, build_manifests(job))).problems == []


async def test_pods_that_fit_on_no_node_are_reported(cluster: FakeKubernetes) -> None:
    cluster.put(make_node("node-1", cpu="8", memory="500Mi"))
    cluster.put(make_node("node-2", cpu="500m", memory="32Gi"))
    problems = (await find_problems(cluster)).problems
    assert all("no node has all the resources it requests" in problem for problem in problems)
    assert len(problems) == 3


# Quotas and queues.


def make_quota(used: str, hard: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "team", "namespace": NAMESPACE},
        "spec": {"hard": {"requests.cpu": hard}},
        "status": {"hard": {"requests.cpu": hard}, "used": {"requests.cpu": used}},
    }


@pytest.mark.slow
async def test_small_or_exhausted_quota_is_reported_with_amounts(
    cluster: FakeKubernetes,
) -> None:
    cluster.put(make_quota("0", "2"))
    message = await find_single_problem(cluster)
    assert "3.5 of requests.cpu, but quota 'team' allows 2; request a larger quota" in message
    cluster.put(make_quota("6500m", "8"))
    assert (
        "quota 'team' has 1.5 left of 8; wait for other runs to end"
        in await find_single_problem(cluster)
    )
    cluster.put(make_quota("1", "8"))
    assert (await find_problems(cluster)).problems == []


def install_kueue(cluster: FakeKubernetes, cpu: str | None = "8") -> None:
    cluster.groups[f"/apis/{KUEUE}"] = {"preferredVersion": {"groupVersion": f"{KUEUE}/v1beta1"}}
    api, resources = f"{KUEUE}/v1beta1", [{"name": "cpu", "nominalQuota": cpu}]
    local_queue = {"metadata": {"name": "team", "namespace": NAMESPACE}, "kind": "LocalQueue"}
    cluster.put({"apiVersion": api, **local_queue, "spec": {"clusterQueue": "all"}})
    if cpu is not None:
        spec = {"resourceGroups": [{"flavors": [{"name": "any", "resources": resources}]}]}
        cluster_queue = {"metadata": {"name": "all", "namespace": ""}, "kind": "ClusterQueue"}
        cluster.put({"apiVersion": api, **cluster_queue, "spec": spec})


@pytest.mark.slow
async def test_every_queue_problem_is_reported(cluster: FakeKubernetes) -> None:
    run_manifests = make_manifests(make_run_config(), make_release(), queue="team")
    assert "uses queue 'team', but Kueue is not installed" in await find_single_problem(
        cluster, run_manifests
    )
    install_kueue(cluster, cpu=None)
    assert "uses ClusterQueue 'all', which does not exist" in await find_single_problem(
        cluster, run_manifests
    )
    install_kueue(cluster, cpu="2")
    message = await find_single_problem(cluster, run_manifests)
    assert "starts with 3.5 of cpu, but queue 'team' has 2 in total" in message
    install_kueue(cluster, cpu="8")
    assert (await find_problems(cluster, run_manifests)).problems == []
    other_queue_run = make_manifests(make_run_config(), make_release(), queue="other")
    assert "no LocalQueue 'other' in namespace 'arena'" in await find_single_problem(
        cluster, other_queue_run
    )


async def test_exhausted_quota_is_no_problem_for_a_queued_run(cluster: FakeKubernetes) -> None:
    cluster.put(make_quota("8", "8"))
    install_kueue(cluster)
    run_manifests = make_manifests(make_run_config(), make_release(), queue="team")
    assert (await find_problems(cluster, run_manifests)).problems == []


# Errors of the API server.


async def test_the_message_of_the_api_server_is_reported(cluster: FakeKubernetes) -> None:
    cluster.fail(422, verb="create", plural="rayjobs")
    assert (await find_single_problem(cluster)).startswith(
        "the API server refuses the RayJob: 422 "
    )
    cluster.fail(403, verb="create", plural="pods")
    message = await find_single_problem(cluster)
    assert message.startswith("the API server refuses the pod of container 'ray-head': 403 ")


async def test_checks_without_permission_are_skipped_with_a_note(cluster: FakeKubernetes) -> None:
    cluster.fail(403, verb="list", plural="nodes")
    findings = await find_problems(cluster)
    assert findings.problems == []
    (note,) = findings.notes
    assert note.startswith("check 'nodes' is skipped: no permission")


async def test_unknown_check_error_lists_known_checks(
    cluster: FakeKubernetes,
) -> None:
    with pytest.raises(ConfigError, match=r"must be one of operator, rules, .*, got 'all'"):
        await find_problems(cluster, None, "all")
