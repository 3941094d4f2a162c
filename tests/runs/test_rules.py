"""Rules of the operator and the queue are checked before a run is submitted."""

from __future__ import annotations

import copy

import pytest

from ludus.services.runs.names import QUEUE_LABEL, job_name_problem
from ludus.services.runs.rules import broken_rules
from tests.runs.release import Json, change_spec, group, manifests, ray_job


def with_cluster(**changed: object) -> Json:
    return change_spec(rayClusterSpec={**ray_job()["spec"]["rayClusterSpec"], **changed})


def with_rollout(**changed: object) -> Json:
    return with_cluster(workerGroupSpecs=[{**group("rollout", 1, 4), **changed}])


def make_queued_job(**spec: object) -> Json:
    job = change_spec(**spec)
    job["metadata"]["labels"][QUEUE_LABEL] = "gpus"
    return job


def deletion(*rules: tuple[str, int]) -> Json:
    return {
        "deletionRules": [
            {"policy": policy, "condition": {"jobStatus": "FAILED", "ttlSeconds": after_s}}
            for policy, after_s in rules
        ]
    }


def test_the_chart_template_violates_no_rule() -> None:
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
    message = job_name_problem(name)
    assert expected in message if expected else message == ""


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (
            change_spec(deletionStrategy=deletion(("DeleteCluster", 1))),
            "deletionRules exclude each other",
        ),
        (
            change_spec(shutdownAfterJobFinishes=False),
            "ttlSecondsAfterFinished needs shutdownAfterJobFinishes",
        ),
        (
            change_spec(
                shutdownAfterJobFinishes=False,
                ttlSecondsAfterFinished=0,
                deletionStrategy=deletion(("DeleteCluster", 60), ("DeleteSelf", 5)),
            ),
            "DeleteSelf after 5 s comes before DeleteCluster after 60 s",
        ),
        (change_spec(activeDeadlineSeconds=0), "activeDeadlineSeconds must be a number"),
        (change_spec(backoffLimit=-1), "backoffLimit must be 0 or more, got -1"),
        (
            change_spec(clusterSelector={"ray.io/cluster": "a"}),
            "backoffLimit cannot be combined with",
        ),
        (change_spec(rayClusterSpec=None), "neither rayClusterSpec nor clusterSelector"),
        (change_spec(entrypointNumCpus=1), "places the driver on a worker"),
        (
            change_spec(submissionMode="InteractiveMode"),
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
        (
            make_queued_job(shutdownAfterJobFinishes=False, ttlSecondsAfterFinished=0),
            "in queue 'gpus' need",
        ),
        (make_queued_job(), 'needs the annotation kueue.x-k8s.io/elastic-job: "true"'),
    ],
)
def test_each_message_has_a_remedy(job: Json, expected: str) -> None:
    message = broken_rules(job)
    assert any(expected in problem for problem in message) if expected else message == []


def test_pods_must_be_complete() -> None:
    job = copy.deepcopy(manifests().job)
    spec = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    head = spec["containers"][0]
    head["image"] = ""
    head["volumeMounts"] = []
    head["env"] = [{"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "120"}]
    spec["restartPolicy"] = "Always"
    message = "\n".join(broken_rules(job))
    assert "container 'ray-head' has no image" in message
    assert "does not mount the run's configuration at /etc/ludus" in message
    assert "terminationGracePeriodSeconds = 120 must be above RAY_GRACEFUL" in message
    assert "restartPolicy: Never" in message
