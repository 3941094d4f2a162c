"""Rules that the API server does not check are checked before a run is submitted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ludus.services.runs.cluster_checks import find_broken_rules
from ludus.services.runs.names import QUEUE_LABEL, explain_job_name_problem
from tests.runs.release import (
    Json,
    build_manifests,
    make_ray_job,
    make_ray_job_template,
    make_worker_group,
)


def make_queued_job(**spec: object) -> Json:
    job = make_ray_job(**spec)
    job["metadata"]["labels"][QUEUE_LABEL] = "gpus"
    return job


def test_chart_template_violates_no_rule() -> None:
    assert list(find_broken_rules(build_manifests())) == []


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
def test_invalid_rayjob_name_is_refused(name: str, expected: str) -> None:
    message = explain_job_name_problem(name)
    assert expected in message if expected else message == ""


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (
            make_ray_job(deletionStrategy={"deletionRules": [{"policy": "DeleteCluster"}]}),
            "deletionRules exclude each other",
        ),
        (
            make_ray_job(
                rayClusterSpec={
                    **make_ray_job_template()["spec"]["rayClusterSpec"],
                    "workerGroupSpecs": [{**make_worker_group("rollout", 1, 4), "replicas": 9}],
                }
            ),
            "worker group 'rollout': replicas 9 must be between 1 and 4",
        ),
        (make_queued_job(shutdownAfterJobFinishes=False), "in queue 'gpus' need"),
        (make_queued_job(), 'needs the annotation kueue.x-k8s.io/elastic-job: "true"'),
    ],
)
def test_a_broken_rule_is_reported(job: Json, expected: str) -> None:
    messages = find_broken_rules(replace(build_manifests(), job=job))
    assert any(expected in message for message in messages)
