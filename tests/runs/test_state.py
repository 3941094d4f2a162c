"""The state of a run is read from its RayJob, and problems of its pods from the pods."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ludus.services.runs.names import QUEUE_LABEL
from ludus.services.runs.state import (
    ClusterRunState,
    RunPhase,
    find_pod_troubles,
    read_pod_phase,
    read_state,
)
from tests.runs.cluster import make_head_pod
from tests.runs.release import Json, build_manifests

STOP_REQUEST = {"data": {"control.json": '{"stop": true}'}}


def make_state(
    control: Json | None = None, suspend: bool = False, **status: Any
) -> ClusterRunState:
    job = build_manifests().job
    job["spec"]["suspend"] = suspend
    return read_state({**job, "status": status}, control)


@pytest.mark.parametrize(
    ("status", "control", "expected"),
    [
        ({}, None, RunPhase.SUBMITTED),
        ({"suspend": True, "jobDeploymentStatus": "Suspended"}, None, RunPhase.SUSPENDED),
        ({"jobDeploymentStatus": "Initializing"}, None, RunPhase.STARTING),
        ({"jobDeploymentStatus": "Waiting"}, None, RunPhase.STARTING),
        ({"jobDeploymentStatus": "Running"}, None, RunPhase.RUNNING),
        ({"jobDeploymentStatus": "Running"}, STOP_REQUEST, RunPhase.STOPPING),
        ({"jobDeploymentStatus": "Retrying"}, None, RunPhase.RETRYING),
        ({"jobDeploymentStatus": "Complete"}, None, RunPhase.SUCCEEDED),
        ({"jobDeploymentStatus": "Complete"}, STOP_REQUEST, RunPhase.STOPPED),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, None, RunPhase.STOPPED),
        ({"jobDeploymentStatus": "Failed"}, STOP_REQUEST, RunPhase.FAILED),
        ({"jobDeploymentStatus": "ValidationFailed"}, None, RunPhase.REFUSED),
        (
            {"jobDeploymentStatus": "Running"},
            {"data": {"control.json": "{"}},
            RunPhase.RUNNING,
        ),
    ],
)
def test_state_combines_operator_status_and_stop_request(
    status: Json, control: Json | None, expected: RunPhase
) -> None:
    assert make_state(control, **status).phase is expected


def test_suspended_run_with_a_queue_is_queued() -> None:
    job = build_manifests().job
    job["metadata"]["labels"][QUEUE_LABEL] = "team"
    job["spec"]["suspend"] = True
    run_state = read_state(job)
    assert (run_state.phase, run_state.queue) == (RunPhase.QUEUED, "team")


def test_a_deleted_run_is_reported() -> None:
    job = build_manifests().job
    job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert read_state(job).phase is RunPhase.DELETING


def test_attempts_and_exit_code_are_read_from_the_operator() -> None:
    run_state = make_state(
        jobDeploymentStatus="Failed",
        reason="AppFailed",
        failed=4,
        message="Job entrypoint command failed with exit code 2, last logs: error: no",
    )
    assert (run_state.num_attempts_failed, run_state.num_attempts_allowed, run_state.exit_code) == (
        4,
        4,
        2,
    )
    assert run_state.reason == "the trainer ended with an error"
    assert run_state.is_over


def make_waiting_pod(reason: str, message: str = "", **fields: Any) -> Json:
    container_state = {"waiting": {"reason": reason, "message": message}}
    return make_head_pod(
        phase="Pending", containerStatuses=[{"image": "i", "state": container_state, **fields}]
    )


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (make_waiting_pod("ErrImageNeverPull"), "image i; load the image onto every node"),
        (make_waiting_pod("ImagePullBackOff", "not\nfound"), "not found; push the image, or set"),
        (
            make_waiting_pod("CreateContainerConfigError", 'secret "a" not found'),
            "create the missing",
        ),
        (
            make_waiting_pod(
                "CrashLoopBackOff", "back-off 10s", lastState={"terminated": {"exitCode": 3}}
            ),
            "CrashLoopBackOff: it exited with code 3; see kubectl logs --previous",
        ),
        (
            make_head_pod(containerStatuses=[{"state": {"terminated": {"reason": "OOMKilled"}}}]),
            "ran out of memory; raise the memory of the pod",
        ),
        (
            make_head_pod("demo", "Failed", reason="Evicted", message="disk"),
            "stopped: Evicted: disk",
        ),
    ],
)
def test_a_pod_problem_is_reported_with_a_remedy(pod: Json, expected: str) -> None:
    (message,) = find_pod_troubles([pod])
    assert message.startswith("the head pod demo-head ")
    assert expected in message


@pytest.mark.parametrize(
    "pod", [make_head_pod(), make_head_pod(phase="Pending"), make_waiting_pod("PodInitializing")]
)
def test_a_slow_pod_has_no_problem(pod: Json) -> None:
    assert find_pod_troubles([pod]) == []


@pytest.mark.parametrize(("age_s", "is_reported"), [(3600, True), (-60, False)])
def test_a_pod_that_stays_terminating_is_reported(age_s: int, is_reported: bool) -> None:
    pod = make_head_pod()
    end = datetime.now(UTC) - timedelta(seconds=age_s)
    pod["metadata"]["deletionTimestamp"] = f"{end:%Y-%m-%dT%H:%M:%SZ}"
    assert read_pod_phase(pod) == "Terminating"
    troubles = find_pod_troubles([pod])
    assert bool(troubles) is is_reported
    if is_reported:
        assert "the head pod demo-head on node node-1 is Terminating" in troubles[0]
        assert "kubectl delete pod demo-head --namespace arena --force" in troubles[0]
