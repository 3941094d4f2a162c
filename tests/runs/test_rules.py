"""What only the operator and the queue refuse is said before anything is submitted."""

from __future__ import annotations

import copy

import pytest

from ludus.services.runs.names import QUEUE_LABEL, job_name_problem
from ludus.services.runs.rules import broken_rules
from tests.runs.release import Json, broken, group, manifests, ray_job


def with_cluster(**changed: object) -> Json:
    return broken(rayClusterSpec={**ray_job()["spec"]["rayClusterSpec"], **changed})


def with_rollout(**changed: object) -> Json:
    return with_cluster(workerGroupSpecs=[{**group("rollout", 1, 4), **changed}])


def queued(**spec: object) -> Json:
    job = broken(**spec)
    job["metadata"]["labels"][QUEUE_LABEL] = "gpus"
    return job


def deletion(*rules: tuple[str, int]) -> Json:
    return {
        "deletionRules": [
            {"policy": policy, "condition": {"jobStatus": "FAILED", "ttlSeconds": after_s}}
            for policy, after_s in rules
        ]
    }


def test_what_the_chart_makes_breaks_no_rule() -> None:
    assert broken_rules(manifests().job) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a" * 48, "48 characters, but a RayJob's name has at most 47"),
        ("Demo_1", "try --set name=demo-1"),
        ("1-demo", "try --set name=run-1-demo"),
        ("demo-", "try --set name=demo"),
        ("a" * 47, ""),
        ("demo-1", ""),
    ],
)
def test_a_name_that_a_rayjob_cannot_have_is_refused(name: str, expected: str) -> None:
    said = job_name_problem(name)
    assert expected in said if expected else said == ""


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (
            broken(deletionStrategy=deletion(("DeleteCluster", 1))),
            "deletionRules exclude each other",
        ),
        (
            broken(shutdownAfterJobFinishes=False),
            "ttlSecondsAfterFinished needs shutdownAfterJobFinishes",
        ),
        (
            broken(
                shutdownAfterJobFinishes=False,
                ttlSecondsAfterFinished=0,
                deletionStrategy=deletion(("DeleteCluster", 60), ("DeleteSelf", 5)),
            ),
            "DeleteSelf after 5 s comes before DeleteCluster after 60 s",
        ),
        (broken(activeDeadlineSeconds=0), "activeDeadlineSeconds must be a number"),
        (broken(backoffLimit=-1), "backoffLimit must be 0 or more, got -1"),
        (broken(clusterSelector={"ray.io/cluster": "a"}), "backoffLimit cannot be combined with"),
        (broken(rayClusterSpec=None), "neither rayClusterSpec nor clusterSelector"),
        (broken(entrypointNumCpus=1), "places the driver on a worker"),
        (
            broken(submissionMode="InteractiveMode"),
            "cannot be combined with Interactive",
        ),
        (with_cluster(rayVersion="2.51.0"), "needs rayVersion 2.52 or newer, got '2.51.0'"),
        (with_cluster(rayVersion=None), "needs rayVersion 2.52 or newer, got ''"),
        (with_cluster(autoscalerOptions={"version": "v1"}), ""),
        (with_rollout(maxReplicas=None), "has no maxReplicas"),
        (with_rollout(minReplicas=5), "minReplicas 5 is above maxReplicas 4"),
        (with_rollout(replicas=9), "replicas 9 must be between 1 and 4"),
        (with_rollout(resources={"rollout": "1"}), "both resources and rayStartParams.resources"),
        (with_rollout(rayStartParams={"labels": "a=b"}), "rayStartParams.labels is not supported"),
        (with_rollout(template={}), "has no container"),
        (queued(shutdownAfterJobFinishes=False, ttlSecondsAfterFinished=0), "in queue 'gpus' need"),
        (queued(), 'needs the annotation kueue.x-k8s.io/elastic-job: "true"'),
    ],
)
def test_each_rule_says_what_to_set(job: Json, expected: str) -> None:
    said = broken_rules(job)
    assert any(expected in one for one in said) if expected else said == []


def test_pods_must_be_complete() -> None:
    job = copy.deepcopy(manifests().job)
    spec = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    head = spec["containers"][0]
    head["image"] = ""
    head["volumeMounts"] = []
    head["env"] = [{"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "120"}]
    spec["restartPolicy"] = "Always"
    said = "\n".join(broken_rules(job))
    assert "container 'ray-head' has no image" in said
    assert "does not mount the run's configuration at /etc/ludus" in said
    assert "terminationGracePeriodSeconds = 120 must be above RAY_GRACEFUL" in said
    assert "restartPolicy: Never" in said
