"""What only KubeRay's operator and Kueue's webhook check on a RayJob, checked before.

The API server takes such a RayJob. The operator then sets ValidationFailed, and a queue may hold
its quota for as long as nobody looks. Each rule is a sentence that says what to set.
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
    why_no_name,
)

_MAX_QUEUED_WORKER_GROUPS = 17
_MIN_TOKEN_VERSION = (2, 52)
_ORDER_OF_DELETION = ("DeleteWorkers", "DeleteCluster", "DeleteSelf")
_DRAIN_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
_DEFAULT_GRACE_S = 30

Rule = Callable[[JsonObject], Iterator[str]]


def broken_rules(job: JsonObject) -> list[str]:
    """What the operator or the queue would refuse, a sentence each."""
    return [said for rule in _RULES for said in rule(job)]


def _name(job: JsonObject) -> Iterator[str]:
    said = why_no_name(str(job["metadata"].get("name", "")))
    if said:
        yield said


def _ends(job: JsonObject) -> Iterator[str]:
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
    yield from _deletion_rules(rules or [], bool(_cluster(job).get("enableInTreeAutoscaling")))
    for field in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if field in spec and not _is_at_least(spec[field], 1):
            yield f"{field} expected a number of seconds above 0, got {spec[field]}"
    for field in ("backoffLimit", "ttlSecondsAfterFinished"):
        if field in spec and not _is_at_least(spec[field], 0):
            yield f"{field} expected 0 or more, got {spec[field]}"


def _deletion_rules(rules: list[JsonObject], is_elastic: bool) -> Iterator[str]:
    times: dict[str, dict[str, int]] = {}
    for rule in rules:
        condition, policy = rule.get("condition") or {}, str(rule.get("policy"))
        state = str(condition.get("jobStatus") or condition.get("jobDeploymentStatus"))
        if policy in times.setdefault(state, {}):
            yield f"deletionRules hold two {policy} for {state}; remove one"
        times[state][policy] = int(condition.get("ttlSeconds") or 0)
        if policy == "DeleteWorkers" and is_elastic:
            yield "deletionRules: DeleteWorkers cannot be had with enableInTreeAutoscaling"
    for state, by_policy in times.items():
        for first, second in pairwise(p for p in _ORDER_OF_DELETION if p in by_policy):
            if by_policy[first] > by_policy[second]:
                yield (
                    f"deletionRules for {state}: {second} after {by_policy[second]} s comes "
                    f"before {first} after {by_policy[first]} s; raise its ttlSeconds"
                )


def _mode(job: JsonObject) -> Iterator[str]:
    spec = job["spec"]
    mode, selector = spec.get("submissionMode", "K8sJobMode"), spec.get("clusterSelector")
    if selector and spec.get("backoffLimit"):
        yield "backoffLimit cannot be had with clusterSelector; set it to 0"
    if selector and (spec.get("suspend") or mode == "SidecarMode"):
        yield "clusterSelector allows neither suspend nor SidecarMode; remove one"
    if not selector and not spec.get("rayClusterSpec"):
        yield "the RayJob has neither rayClusterSpec nor clusterSelector; set rayClusterSpec"
    if mode == "InteractiveMode" and spec.get("backoffLimit"):
        yield "backoffLimit cannot be had with InteractiveMode; set it to 0"
    if mode == "SidecarMode" and (spec.get("submitterPodTemplate") or spec.get("submitterConfig")):
        yield "SidecarMode has no submitter; remove submitterPodTemplate and submitterConfig"
    on_worker = [f for f in ("entrypointNumCpus", "entrypointNumGpus") if spec.get(f)]
    head_params = (_cluster(job).get("headGroupSpec") or {}).get("rayStartParams") or {}
    if on_worker and str(head_params.get("num-cpus")) == "0":
        yield (
            f"{on_worker[0]} with num-cpus: '0' on the head puts the driver on a worker, whose "
            "end is the run's; remove it"
        )


def _groups(job: JsonObject) -> Iterator[str]:
    cluster = _cluster(job)
    is_v2 = (cluster.get("autoscalerOptions") or {}).get("version") == "v2"
    head = cluster.get("headGroupSpec") or {}
    if cluster and not pod_containers(head_template(job)):
        yield "headGroupSpec has no container; give it one with the trainer's image"
    yield from _resources("headGroupSpec", head)
    for group in worker_groups(job):
        name = f"worker group '{group.get('groupName')}'"
        yield from _resources(name, group)
        if not pod_containers(group.get("template") or {}):
            yield f"{name} has no container; give it one with the trainer's image"
        yield from _sizes(name, group)
        if "idleTimeoutSeconds" in group and not is_v2:
            yield f"{name}: idleTimeoutSeconds needs autoscalerOptions.version: v2; set it"
        if "suspend" in group:
            yield f"{name}: suspend belongs to the operator; remove it"
    if is_v2:
        for template in pod_templates(job):
            if (template.get("spec") or {}).get("restartPolicy") not in (None, "Never"):
                yield "autoscaler v2 needs restartPolicy: Never on every pod; set it or remove it"


def _sizes(name: str, group: JsonObject) -> Iterator[str]:
    least, most = group.get("minReplicas"), group.get("maxReplicas")
    if most is None:
        yield f"{name} has no maxReplicas, which stands for 2147483647; set it"
    elif least is not None and least > most:
        yield f"{name}: minReplicas {least} is more than maxReplicas {most}; lower the one"
    elif not (least or 0) <= (group.get("replicas") or 0) <= most:
        yield f"{name}: replicas {group.get('replicas')} is not within {least or 0} and {most}"


def _resources(name: str, group: JsonObject) -> Iterator[str]:
    params = group.get("rayStartParams") or {}
    both = sorted({"num-cpus", "num-gpus", "memory", "resources"} & set(params))
    if group.get("resources") and both:
        yield f"{name} has both resources and rayStartParams.{both[0]}; keep one of them"
    if "labels" in params:
        yield f"{name}: rayStartParams.labels is refused; set labels of the group"


def _versions(job: JsonObject) -> Iterator[str]:
    cluster = _cluster(job)
    if (cluster.get("authOptions") or {}).get("mode") != "token":
        return
    version = str(cluster.get("rayVersion") or "")
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or (int(found[1]), int(found[2])) < _MIN_TOKEN_VERSION:
        yield (
            f"authOptions.mode: token needs rayVersion 2.52 or newer, got '{version}'; set it to "
            "the version of Ray in the image"
        )


def _queued(job: JsonObject) -> Iterator[str]:
    queue = (job["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    if not queue:
        return
    spec = job["spec"]
    if not spec.get("shutdownAfterJobFinishes"):
        yield f"a run in queue '{queue}' needs shutdownAfterJobFinishes: true; set it"
    if (spec.get("deletionStrategy") or {}).get("deletionRules"):
        yield f"a run in queue '{queue}' cannot have deletionRules; remove them"
    if spec.get("clusterSelector"):
        yield f"a run in queue '{queue}' needs its own cluster; remove clusterSelector"
    if len(worker_groups(job)) > _MAX_QUEUED_WORKER_GROUPS:
        yield (
            f"a run in queue '{queue}' may have {_MAX_QUEUED_WORKER_GROUPS} worker groups, got "
            f"{len(worker_groups(job))}; remove some"
        )
    is_elastic = (job["metadata"].get("annotations") or {}).get(ELASTIC_ANNOTATION) == "true"
    if _cluster(job).get("enableInTreeAutoscaling") and not is_elastic:
        yield (
            f"a run in queue '{queue}' with autoscaling needs the annotation "
            f'{ELASTIC_ANNOTATION}: "true"; set it, or turn autoscaling off'
        )


def _containers(job: JsonObject) -> Iterator[str]:
    for template in pod_templates(job):
        spec = template.get("spec") or {}
        for container in [*pod_containers(template), *(spec.get("initContainers") or [])]:
            if not container.get("image"):
                yield f"container '{container.get('name')}' names no image; set image.registry"
        yield from _grace(spec)
    head = pod_containers(head_template(job))[:1]
    mounted = {mount.get("mountPath") for one in head for mount in one.get("volumeMounts") or []}
    if head and CONFIG_FOLDER not in mounted:
        yield (
            f"the head mounts nothing at {CONFIG_FOLDER}, where the run's configuration belongs; "
            "upgrade the release"
        )


def _grace(spec: JsonObject) -> Iterator[str]:
    grace_s = spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    for container in spec.get("containers") or []:
        for variable in container.get("env") or []:
            drain = str(variable.get("value", ""))
            is_drain = variable.get("name") == _DRAIN_VARIABLE and drain.isdecimal()
            if is_drain and int(drain) >= grace_s:
                yield (
                    f"container '{container.get('name')}': {_DRAIN_VARIABLE} = {drain} s does not "
                    f"fit into terminationGracePeriodSeconds = {grace_s}; raise the latter"
                )


def _cluster(job: JsonObject) -> JsonObject:
    return job["spec"].get("rayClusterSpec") or {}


def _is_at_least(value: Any, least: int) -> bool:
    return isinstance(value, int) and value >= least


_RULES: tuple[Rule, ...] = (_name, _ends, _mode, _groups, _versions, _queued, _containers)
