"""Where a run in a cluster stands, in words: from its RayJob, its pods and their troubles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from ludus.proto.runs import RunControl
from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.names import CONTROL_KEY, GROUP_LABEL, QUEUE_LABEL


class RunPhase(StrEnum):
    """What is becoming of a run."""

    SUBMITTED = "submitted"
    """No operator has looked at it yet."""
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
    """The operator says that the RayJob cannot be."""
    ENDING = "being deleted"


_OVER = {RunPhase.SUCCEEDED, RunPhase.STOPPED, RunPhase.FAILED, RunPhase.REFUSED}
_MAX_REASON_CHARS = 400
_EXIT_CODE = re.compile(r"failed with exit code (-?\d+)")

_HINTS = {
    "ErrImageNeverPull": "load the image onto every node, or set image.pullPolicy",
    "ErrImagePull": "push the image, or set image.registry, image.tag and image.pullSecrets",
    "ImagePullBackOff": "push the image, or set image.registry, image.tag and image.pullSecrets",
    "InvalidImageName": "correct image.registry and image.tag",
    "CreateContainerConfigError": "create what is missing, or correct its name in the values",
    "CreateContainerError": "see kubectl describe pod",
    "RunContainerError": "see kubectl describe pod",
    "CrashLoopBackOff": "see kubectl logs --previous",
    "OOMKilled": "raise its memory in the values",
}


@dataclass(frozen=True, slots=True)
class RunState:
    """One look at a run."""

    name: str
    phase: RunPhase
    reason: str = ""
    """Why it stands where it stands; empty where the phase says all."""
    message: str = ""
    """What the driver said last, where it failed."""
    ray_cluster: str = ""
    attempts_failed: int = 0
    attempts_allowed: int = 1
    queue: str = ""

    @property
    def is_over(self) -> bool:
        """True when nothing more will happen."""
        return self.phase in _OVER

    @property
    def exit_code(self) -> int | None:
        """The driver's, where Ray tells it."""
        found = _EXIT_CODE.search(self.message)
        return int(found[1]) if found else None


def state_of(job: JsonObject, config_map: JsonObject | None = None) -> RunState:
    """Where a run stands, by its RayJob and what its control file wants."""
    status, spec, metadata = job.get("status") or {}, job.get("spec") or {}, job["metadata"]
    return RunState(
        name=metadata["name"],
        phase=_phase(job, status, is_stop_wanted(config_map)),
        reason=_reason(status),
        message=str(status.get("message") or ""),
        ray_cluster=str(status.get("rayClusterName") or ""),
        attempts_failed=int(status.get("failed") or 0),
        attempts_allowed=int(spec.get("backoffLimit") or 0) + 1,
        queue=str((metadata.get("labels") or {}).get(QUEUE_LABEL, "")),
    )


def is_stop_wanted(config_map: JsonObject | None) -> bool:
    """Whether somebody asked the run to stop."""
    text = ((config_map or {}).get("data") or {}).get(CONTROL_KEY)
    try:
        return RunControl.model_validate_json(text or "{}").stop
    except ValidationError:
        return False


def _phase(job: JsonObject, status: JsonObject, stop_wanted: bool) -> RunPhase:
    if job["metadata"].get("deletionTimestamp"):
        return RunPhase.ENDING
    match status.get("jobDeploymentStatus") or "":
        case "Complete":
            ended_early = stop_wanted or status.get("jobStatus") == "STOPPED"
            return RunPhase.STOPPED if ended_early else RunPhase.SUCCEEDED
        case "Failed":
            return RunPhase.FAILED
        case "ValidationFailed":
            return RunPhase.REFUSED
        case "Retrying":
            return RunPhase.RETRYING
        case "Running":
            return RunPhase.STOPPING if stop_wanted else RunPhase.RUNNING
        case "Initializing" | "Waiting":
            return RunPhase.STARTING
        case _ if (job.get("spec") or {}).get("suspend"):
            is_queued = QUEUE_LABEL in (job["metadata"].get("labels") or {})
            return RunPhase.QUEUED if is_queued else RunPhase.SUSPENDED
        case _:
            return RunPhase.SUBMITTED


def _reason(status: JsonObject) -> str:
    if status.get("jobDeploymentStatus") == "ValidationFailed":
        return _short(status.get("message"))
    reason = str(status.get("reason") or "")
    return {
        "": "",
        "AppFailed": "the trainer ended with an error",
        "DeadlineExceeded": "it took longer than activeDeadlineSeconds",
        "PreRunningDeadlineExceeded": "it did not begin within preRunningDeadlineSeconds",
        "SubmissionFailed": "the job could not be handed to Ray",
        "JobStatusCheckTimeoutExceeded": "the head did not answer any more",
    }.get(reason, reason)


# What keeps its pods from running.


def pod_troubles(pods: Sequence[JsonObject]) -> list[str]:
    """What keeps pods from running, a sentence each, with the way out where one is known."""
    return [said for pod in pods for said in _troubles_of(pod)]


def role_of(pod: JsonObject) -> str:
    """What a pod does in its RayCluster: head, learner, rollout."""
    group = str((pod["metadata"].get("labels") or {}).get(GROUP_LABEL, ""))
    return group.removesuffix("group") or "pod"


def _troubles_of(pod: JsonObject) -> Iterator[str]:
    status, name = pod.get("status") or {}, f"the {role_of(pod)} pod {pod['metadata']['name']}"
    for condition in status.get("conditions") or []:
        is_scheduled = condition.get("type") != "PodScheduled" or condition.get("status") == "True"
        if not is_scheduled and status.get("phase") == "Pending":
            yield f"{name} waits for a node: {_short(condition.get('message'))}"
    found = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    for container in found:
        yield from _container_troubles(container, name)
    if status.get("phase") == "Failed" and status.get("reason"):
        yield f"{name} was ended: {status['reason']}: {_short(status.get('message'))}"


def _container_troubles(container: JsonObject, name: str) -> Iterator[str]:
    state = container.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
    reason = str(waiting.get("reason") or "")
    if reason in _HINTS:
        said = _short(waiting.get("message")) or f"image {container.get('image')}"
        if reason == "CrashLoopBackOff":  # the message counts seconds: it is always a new one
            last = (container.get("lastState") or {}).get("terminated") or {}
            said = f"it ended with exit code {last.get('exitCode')}"
        yield f"{name} does not start: {reason}: {said}; {_HINTS[reason]}"
    if ended.get("reason") == "OOMKilled":
        yield f"{name} ended for lack of memory; {_HINTS['OOMKilled']}"


def _short(text: Any) -> str:
    return " ".join(str(text or "").split())[:_MAX_REASON_CHARS]
