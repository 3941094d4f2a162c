"""Rules for RayJobs that only the KubeRay operator and the Kueue webhook check.

The API server accepts a RayJob that breaks them. The operator then sets ValidationFailed, and a
queue may reserve quota for the RayJob until someone notices. Each message names the field to set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.manifest import (
    head_template,
    pod_containers,
    pod_templates,
    worker_groups,
)
from ludus.services.runs.names import (
    CONFIG_FOLDER,
    ELASTIC_ANNOTATION,
    QUEUE_LABEL,
    job_name_problem,
)

_MAX_QUEUED_WORKER_GROUPS = 17
_MIN_TOKEN_VERSION = (2, 52)
_ORDER_OF_DELETION = ("DeleteWorkers", "DeleteCluster", "DeleteSelf")
_DRAIN_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
_DEFAULT_GRACE_S = 30

Rule = Callable[[JsonObject], Iterator[str]]


def broken_rules(job: JsonObject) -> list[str]:
    """Return a message for each rule that the operator or the queue would enforce."""
    return [message for rule in _RULES for message in rule(job)]


def _check_name(job: JsonObject) -> Iterator[str]:
    problem = job_name_problem(str(job["metadata"].get("name", "")))
    if problem:
        yield problem


def _check_shutdown(job: JsonObject) -> Iterator[str]:
    spec = job["spec"]
    shuts_down = bool(spec.get("shutdownAfterJobFinishes"))
    rules = (spec.get("deletionStrategy") or {}).get("deletionRules")
    if rules and shuts_down:
        yield (
            "shutdownAfterJobFinishes and deletionStrategy.deletionRules exclude each other; "
            "remove one from the RayJob"
        )
    if not shuts_down and spec.get("ttlSecondsAfterFinished"):
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes: true; set it"
    if not shuts_down and spec.get("suspend"):
        yield "suspend needs shutdownAfterJobFinishes: true; set it"
    yield from _check_deletion_rules(
        rules or [], bool(_cluster(job).get("enableInTreeAutoscaling"))
    )
    for field in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if field in spec and not _is_at_least(spec[field], 1):
            yield f"{field} must be a number of seconds above 0, got {spec[field]}"
    for field in ("backoffLimit", "ttlSecondsAfterFinished"):
        if field in spec and not _is_at_least(spec[field], 0):
            yield f"{field} must be 0 or more, got {spec[field]}"


def _check_deletion_rules(rules: list[JsonObject], is_elastic: bool) -> Iterator[str]:
    times: dict[str, dict[str, int]] = {}
    for rule in rules:
        condition, policy = rule.get("condition") or {}, str(rule.get("policy"))
        state = str(condition.get("jobStatus") or condition.get("jobDeploymentStatus"))
        if policy in times.setdefault(state, {}):
            yield f"deletionRules contain {policy} for {state} twice; remove one"
        times[state][policy] = int(condition.get("ttlSeconds") or 0)
        if policy == "DeleteWorkers" and is_elastic:
            yield "deletionRules: DeleteWorkers cannot be combined with enableInTreeAutoscaling"
    for state, by_policy in times.items():
        for first, second in pairwise(p for p in _ORDER_OF_DELETION if p in by_policy):
            if by_policy[first] > by_policy[second]:
                yield (
                    f"deletionRules for {state}: {second} after {by_policy[second]} s comes "
                    f"before {first} after {by_policy[first]} s; raise its ttlSeconds"
                )


def _check_mode(job: JsonObject) -> Iterator[str]:
    spec = job["spec"]
    mode, selector = spec.get("submissionMode", "K8sJobMode"), spec.get("clusterSelector")
    if selector and spec.get("backoffLimit"):
        yield "backoffLimit cannot be combined with clusterSelector; set backoffLimit to 0"
    if selector and (spec.get("suspend") or mode == "SidecarMode"):
        yield "clusterSelector allows neither suspend nor SidecarMode; remove one"
    if not selector and not spec.get("rayClusterSpec"):
        yield "the RayJob has neither rayClusterSpec nor clusterSelector; set rayClusterSpec"
    if mode == "InteractiveMode" and spec.get("backoffLimit"):
        yield "backoffLimit cannot be combined with InteractiveMode; set backoffLimit to 0"
    if mode == "SidecarMode" and (spec.get("submitterPodTemplate") or spec.get("submitterConfig")):
        yield "SidecarMode has no submitter; remove submitterPodTemplate and submitterConfig"
    worker_fields = [f for f in ("entrypointNumCpus", "entrypointNumGpus") if spec.get(f)]
    head_params = (_cluster(job).get("headGroupSpec") or {}).get("rayStartParams") or {}
    if worker_fields and str(head_params.get("num-cpus")) == "0":
        yield (
            f"{worker_fields[0]} with num-cpus: '0' on the head places the driver on a worker, and "
            "the run would end with that worker; remove it"
        )


def _check_groups(job: JsonObject) -> Iterator[str]:
    cluster = _cluster(job)
    is_v2 = (cluster.get("autoscalerOptions") or {}).get("version") == "v2"
    head = cluster.get("headGroupSpec") or {}
    if cluster and not pod_containers(head_template(job)):
        yield "headGroupSpec has no container; give it one with the trainer's image"
    yield from _check_resources("headGroupSpec", head)
    for group in worker_groups(job):
        name = f"worker group '{group.get('groupName')}'"
        yield from _check_resources(name, group)
        if not pod_containers(group.get("template") or {}):
            yield f"{name} has no container; give it one with the trainer's image"
        yield from _check_sizes(name, group)
        if "idleTimeoutSeconds" in group and not is_v2:
            yield f"{name}: idleTimeoutSeconds needs autoscalerOptions.version: v2; set it"
        if "suspend" in group:
            yield f"{name}: only the operator may set suspend; remove it"
    if is_v2:
        for template in pod_templates(job):
            if (template.get("spec") or {}).get("restartPolicy") not in (None, "Never"):
                yield "autoscaler v2 needs restartPolicy: Never on every pod; set it or remove it"


def _check_sizes(name: str, group: JsonObject) -> Iterator[str]:
    minimum, maximum = group.get("minReplicas"), group.get("maxReplicas")
    if maximum is None:
        yield f"{name} has no maxReplicas, which means 2147483647; set it"
    elif minimum is not None and minimum > maximum:
        yield f"{name}: minReplicas {minimum} is above maxReplicas {maximum}; lower minReplicas"
    elif not (minimum or 0) <= (group.get("replicas") or 0) <= maximum:
        yield (
            f"{name}: replicas {group.get('replicas')} must be between {minimum or 0} and {maximum}"
        )


def _check_resources(name: str, group: JsonObject) -> Iterator[str]:
    params = group.get("rayStartParams") or {}
    conflicting = sorted({"num-cpus", "num-gpus", "memory", "resources"} & set(params))
    if group.get("resources") and conflicting:
        yield f"{name} has both resources and rayStartParams.{conflicting[0]}; remove one"
    if "labels" in params:
        yield f"{name}: rayStartParams.labels is not supported; set the group's labels instead"


def _check_versions(job: JsonObject) -> Iterator[str]:
    cluster = _cluster(job)
    if (cluster.get("authOptions") or {}).get("mode") != "token":
        return
    version = str(cluster.get("rayVersion") or "")
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match or (int(match[1]), int(match[2])) < _MIN_TOKEN_VERSION:
        yield (
            f"authOptions.mode: token needs rayVersion 2.52 or newer, got '{version}'; set "
            "rayVersion to the version of Ray in the image"
        )


def _check_queue(job: JsonObject) -> Iterator[str]:
    queue = (job["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    if not queue:
        return
    spec = job["spec"]
    if not spec.get("shutdownAfterJobFinishes"):
        yield f"a run in queue '{queue}' needs shutdownAfterJobFinishes: true; set it"
    if (spec.get("deletionStrategy") or {}).get("deletionRules"):
        yield f"a run in queue '{queue}' cannot have deletionRules; remove them"
    if spec.get("clusterSelector"):
        yield f"a run in queue '{queue}' needs a separate cluster; remove clusterSelector"
    if len(worker_groups(job)) > _MAX_QUEUED_WORKER_GROUPS:
        yield (
            f"a run in queue '{queue}' may have at most {_MAX_QUEUED_WORKER_GROUPS} worker groups, "
            f"got {len(worker_groups(job))}; remove some"
        )
    is_elastic = (job["metadata"].get("annotations") or {}).get(ELASTIC_ANNOTATION) == "true"
    if _cluster(job).get("enableInTreeAutoscaling") and not is_elastic:
        yield (
            f"a run in queue '{queue}' with autoscaling needs the annotation "
            f'{ELASTIC_ANNOTATION}: "true"; set it, or disable autoscaling'
        )


def _check_containers(job: JsonObject) -> Iterator[str]:
    for template in pod_templates(job):
        spec = template.get("spec") or {}
        for container in [*pod_containers(template), *(spec.get("initContainers") or [])]:
            if not container.get("image"):
                yield f"container '{container.get('name')}' has no image; set image.registry"
        yield from _check_grace_period(spec)
    for container in pod_containers(head_template(job))[:1]:
        mounts = {mount.get("mountPath") for mount in container.get("volumeMounts") or []}
        if CONFIG_FOLDER not in mounts:
            yield (
                f"the head does not mount the run's configuration at {CONFIG_FOLDER}; upgrade the "
                "release"
            )


def _check_grace_period(spec: JsonObject) -> Iterator[str]:
    grace_s = spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    for container in spec.get("containers") or []:
        for variable in container.get("env") or []:
            drain = str(variable.get("value", ""))
            is_drain = variable.get("name") == _DRAIN_VARIABLE and drain.isdecimal()
            if is_drain and int(drain) >= grace_s:
                yield (
                    f"container '{container.get('name')}': terminationGracePeriodSeconds = "
                    f"{grace_s} must be above {_DRAIN_VARIABLE} = {drain}; raise it"
                )


def _cluster(job: JsonObject) -> JsonObject:
    return job["spec"].get("rayClusterSpec") or {}


def _is_at_least(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and value >= minimum


_RULES: tuple[Rule, ...] = (
    _check_name,
    _check_shutdown,
    _check_mode,
    _check_groups,
    _check_versions,
    _check_queue,
    _check_containers,
)
