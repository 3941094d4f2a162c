"""The state of a run on a cluster, derived from its RayJob, its ConfigMap and its pods."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from ludus.proto.runs import RunControl
from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.names import COMPONENT_LABEL, CONTROL_KEY, GROUP_LABEL, QUEUE_LABEL


class RunPhase(StrEnum):
    """A phase of a run on a cluster."""

    SUBMITTED = "submitted"
    """The RayJob exists, but no operator has processed it."""
    QUEUED = "queued"
    SUSPENDED = "suspended"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    RETRYING = "retrying"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"
    REFUSED = "refused"
    """The operator reports that the RayJob is invalid."""
    DELETING = "being deleted"


_FINAL_PHASES = {RunPhase.SUCCEEDED, RunPhase.STOPPED, RunPhase.FAILED, RunPhase.REFUSED}
_MAX_REASON_CHARS = 400
_STUCK_AFTER = timedelta(minutes=1)
"""Time after the end of its grace period at which a deleted pod must be gone."""
_EXIT_CODE_PATTERN = re.compile(r"failed with exit code (-?\d+)")

_REMEDIES = {
    "ErrImageNeverPull": "load the image onto every node, or set image.pullPolicy",
    "ErrImagePull": "push the image, or set image.registry, image.tag and image.pullSecrets",
    "ImagePullBackOff": "push the image, or set image.registry, image.tag and image.pullSecrets",
    "InvalidImageName": "correct image.registry and image.tag",
    "CreateContainerConfigError": "create the missing object, or correct its name in the values",
    "CreateContainerError": "see kubectl describe pod",
    "RunContainerError": "see kubectl describe pod",
    "CrashLoopBackOff": "see kubectl logs --previous",
    "OOMKilled": "raise the memory of the pod in the values",
}


@dataclass(frozen=True, slots=True)
class ClusterRunState:
    """The state of a run at one moment."""

    name: str
    phase: RunPhase
    reason: str = ""
    """Reason for the phase; empty if none is known."""
    message: str = ""
    """Last output of the driver, if it failed."""
    ray_cluster: str = ""
    num_attempts_failed: int = 0
    num_attempts_allowed: int = 1
    queue: str = ""
    created_at: str = ""
    """Creation time in ISO 8601."""
    ended_at: str = ""
    """Time of the end in ISO 8601; empty before the end, or if it is unknown."""

    @property
    def is_over(self) -> bool:
        """True if the phase is final."""
        return self.phase in _FINAL_PHASES

    @property
    def exit_code(self) -> int | None:
        """Exit code of the driver; None if Ray does not report it."""
        match = _EXIT_CODE_PATTERN.search(self.message)
        return int(match[1]) if match else None


def read_state(job: JsonObject, config_map: JsonObject | None = None) -> ClusterRunState:
    """Derive the state of a run from its RayJob and the control file in its ConfigMap."""
    status, spec, metadata = job.get("status") or {}, job.get("spec") or {}, job["metadata"]
    return ClusterRunState(
        name=metadata["name"],
        phase=_derive_phase(job, status, is_stop_requested(config_map)),
        reason=_derive_reason(status),
        message=str(status.get("message") or ""),
        ray_cluster=str(status.get("rayClusterName") or ""),
        num_attempts_failed=int(status.get("failed") or 0),
        num_attempts_allowed=int(spec.get("backoffLimit") or 0) + 1,
        queue=str((metadata.get("labels") or {}).get(QUEUE_LABEL, "")),
        created_at=metadata.get("creationTimestamp", ""),
        ended_at=str(status.get("endTime") or ""),
    )


def is_stop_requested(config_map: JsonObject | None) -> bool:
    """Return whether the control file requests a stop."""
    control_json = ((config_map or {}).get("data") or {}).get(CONTROL_KEY)
    try:
        return RunControl.model_validate_json(control_json or "{}").stop
    except ValidationError:
        return False


def _derive_phase(job: JsonObject, status: JsonObject, has_stop_request: bool) -> RunPhase:
    if job["metadata"].get("deletionTimestamp"):
        return RunPhase.DELETING
    match status.get("jobDeploymentStatus") or "":
        case "Complete":
            is_stopped = has_stop_request or status.get("jobStatus") == "STOPPED"
            return RunPhase.STOPPED if is_stopped else RunPhase.SUCCEEDED
        case "Failed":
            return RunPhase.FAILED
        case "ValidationFailed":
            return RunPhase.REFUSED
        case "Retrying":
            return RunPhase.RETRYING
        case "Running":
            return RunPhase.STOPPING if has_stop_request else RunPhase.RUNNING
        case "Initializing" | "Waiting":
            return RunPhase.STARTING
        case _ if (job.get("spec") or {}).get("suspend"):
            is_queued = QUEUE_LABEL in (job["metadata"].get("labels") or {})
            return RunPhase.QUEUED if is_queued else RunPhase.SUSPENDED
        case _:
            return RunPhase.SUBMITTED


def _derive_reason(status: JsonObject) -> str:
    if status.get("jobDeploymentStatus") == "ValidationFailed":
        return _shorten(status.get("message"))
    reason = str(status.get("reason") or "")
    return {
        "": "",
        "AppFailed": "the trainer ended with an error",
        "DeadlineExceeded": "the run exceeded activeDeadlineSeconds",
        "PreRunningDeadlineExceeded": "the run did not start within preRunningDeadlineSeconds",
        "SubmissionFailed": "the job could not be submitted to Ray",
        "JobStatusCheckTimeoutExceeded": "the head no longer responds",
    }.get(reason, reason)


# Pods that do not run.


def find_pod_troubles(pods: Sequence[JsonObject]) -> list[str]:
    """Return the reasons why pods do not run, with remedies if they are known."""
    return [trouble for pod in pods for trouble in _find_troubles(pod)]


def read_pod_phase(pod: JsonObject) -> str:
    """Return the phase of a pod, or Terminating if the pod is being deleted, like kubectl."""
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    return str((pod.get("status") or {}).get("phase", ""))


def read_pod_role(pod: JsonObject) -> str:
    """Return the role of a pod: head, learner or rollout, or the component of another pod."""
    labels = pod["metadata"].get("labels") or {}
    role = labels.get(GROUP_LABEL) or labels.get(COMPONENT_LABEL) or "other"
    return str(role).removesuffix("group")


def _find_troubles(pod: JsonObject) -> Iterator[str]:
    status = pod.get("status") or {}
    name = f"the {read_pod_role(pod)} pod {pod['metadata']['name']}"
    for condition in status.get("conditions") or []:
        is_scheduled = condition.get("type") != "PodScheduled" or condition.get("status") == "True"
        if not is_scheduled and status.get("phase") == "Pending":
            yield f"{name} waits for a node: {_shorten(condition.get('message'))}"
    for status_field in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(status_field) or []:
            yield from _find_container_troubles(container, name)
    if _is_stuck(pod):
        metadata, node = pod["metadata"], (pod.get("spec") or {}).get("nodeName", "")
        yield (
            f"{name} on node {node} is Terminating and does not end, so it is not replaced; if the "
            f"node is lost, remove the pod with: kubectl delete pod {metadata['name']} --namespace "
            f"{metadata['namespace']} --force"
        )
    if status.get("phase") == "Failed" and status.get("reason"):
        yield f"{name} was stopped: {status['reason']}: {_shorten(status.get('message'))}"


def _is_stuck(pod: JsonObject) -> bool:
    """Return whether a deleted pod still exists although its grace period is over."""
    end = pod["metadata"].get("deletionTimestamp")
    return bool(end) and datetime.now(UTC) - datetime.fromisoformat(end) > _STUCK_AFTER


def _find_container_troubles(container: JsonObject, name: str) -> Iterator[str]:
    state = container.get("state") or {}
    waiting_state, terminated_state = state.get("waiting") or {}, state.get("terminated") or {}
    reason = str(waiting_state.get("reason") or "")
    if reason in _REMEDIES:
        detail = _shorten(waiting_state.get("message")) or f"image {container.get('image')}"
        if reason == "CrashLoopBackOff":  # its own message contains a changing number of seconds
            last_state = (container.get("lastState") or {}).get("terminated") or {}
            detail = f"it exited with code {last_state.get('exitCode')}"
        yield f"{name} does not start: {reason}: {detail}; {_REMEDIES[reason]}"
    if terminated_state.get("reason") == "OOMKilled":
        yield f"{name} ran out of memory; {_REMEDIES['OOMKilled']}"


def _shorten(text: Any) -> str:
    return " ".join(str(text or "").split())[:_MAX_REASON_CHARS]
