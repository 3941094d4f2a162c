"""The Kubernetes objects of a run, built from its configuration and a release.

    LanguageModelRun --adapt_to_release--> LanguageModelRun --+
                                                              +--> make_manifests --> RayJob,
    Release --templates---------------------------------------+                       ConfigMap,
                                                                                      NetworkPolicy

This module sends no requests.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ludus.proto.config import (
    LanguageModelRun,
    LocalEnvironment,
    PrometheusSink,
    RemoteEnvironment,
    S3WeightStore,
    WeightStoreConfig,
)
from ludus.proto.errors import ConfigError
from ludus.proto.runs import CONTROL_VARIABLE
from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.names import (
    CONFIG_FOLDER,
    CONTROL_KEY,
    ELASTIC_ANNOTATION,
    NETWORK_LABEL,
    PLACEHOLDER,
    QUEUE_LABEL,
    RELEASE_LABEL,
    RUN_KEY,
    RUN_LABEL,
    make_config_map_name,
    make_policy_name,
)
from ludus.services.runs.platform import Platform, PlatformEnvironment, Release

LEARNER_GROUP, ROLLOUT_GROUP = "learner", "rollout"
_CONTAINER_LOG = "/proc/1/fd/1"


@dataclass(frozen=True, slots=True)
class RunManifests:
    """The Kubernetes objects of a run."""

    run: LanguageModelRun
    """Run configuration for the trainer on the cluster."""
    job: JsonObject
    config_map: JsonObject
    network_policy: JsonObject | None = None
    """Policy that lets only the run's pods reach each other; None in an open network."""

    @property
    def objects(self) -> list[JsonObject]:
        """All objects, in the order of their creation."""
        policies = [self.network_policy] if self.network_policy is not None else []
        return [self.config_map, *policies, self.job]


def make_manifests(
    run: LanguageModelRun,
    release: Release,
    environments: Mapping[str, str] | None = None,
    queue: str | None = None,
) -> RunManifests:
    """Build the objects of a run.

    Args:
        environments: names in the release of environments whose names differ, by name in the run.
        queue: Kueue queue for the run; None uses the release's queue.

    Raises:
        ConfigError: the release does not serve the run's environments.
    """
    run = adapt_to_release(run, release.platform, environments or {})
    job = _insert_run_name(release.template, run.name)
    labels = {RUN_LABEL: run.name, RELEASE_LABEL: release.platform.release}
    _add_labels(job, labels, release.platform.namespace)
    job["spec"]["metadata"] = {**(job["spec"].get("metadata") or {}), "run_id": run.name}
    network_policy = None
    if release.policy_template is not None:
        network_policy = _insert_run_name(release.policy_template, run.name)
        _add_labels(network_policy, labels, release.platform.namespace)
    network_labels = {} if network_policy is None else {NETWORK_LABEL: "run"}
    for template in get_pod_templates(job):
        _add_labels(template, {**labels, **network_labels})
    _size_groups(job, run, release.platform)
    job["spec"]["entrypoint"] = _copy_output_to_log(job["spec"]["entrypoint"])
    if queue is not None:
        _set_queue(job, queue)
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": make_config_map_name(run.name)},
        "data": {RUN_KEY: run.model_dump_json(indent=2)},
    }
    _add_labels(config_map, labels, release.platform.namespace)
    return RunManifests(run, job, config_map, network_policy)


def adapt_to_release(
    run: LanguageModelRun, platform: Platform, environments: Mapping[str, str]
) -> LanguageModelRun:
    """Return the run's configuration with the release's environments, folder and weight store.

    Raises:
        ConfigError: the release does not serve the run's environments.
    """
    unknown_names = sorted(set(environments) - set(run.environments))
    if unknown_names:
        raise ConfigError(
            f"--environment {unknown_names[0]}=...: the run has no environment "
            f"'{unknown_names[0]}'; it has {', '.join(run.environments)}"
        )
    changes: dict[str, Any] = {
        "environments": {
            name: _find_served_environment(name, environment, platform, environments.get(name))
            for name, environment in run.environments.items()
        },
        "output_dir": platform.output_dir,
        "weights": _choose_weight_store(run.weights, platform),
    }
    if platform.metrics_port and run.metrics.prometheus is None:
        sink = PrometheusSink(port=platform.metrics_port, host="0.0.0.0")
        changes["metrics"] = run.metrics.model_copy(update={"prometheus": sink})
    return run.model_copy(update=changes)


def _find_served_environment(
    name: str,
    environment: LocalEnvironment | RemoteEnvironment,
    platform: Platform,
    platform_name: str | None,
) -> LocalEnvironment | RemoteEnvironment:
    """Return the remote environment that serves one of the run's environments."""
    if isinstance(environment, RemoteEnvironment) and platform_name is None:
        return environment
    served_name, alternative = platform_name or name, f"another with --environment {name}=NAME"
    local_environment = environment if isinstance(environment, LocalEnvironment) else None
    candidate = platform.environments.get(served_name)
    if candidate is None and platform_name is None and local_environment:
        candidate = _find_unique_match(local_environment, platform)
    if candidate is None:
        raise ConfigError(
            f"environments.{name}: release '{platform.release}' does not serve '{served_name}'; "
            f"it serves {', '.join(platform.environments) or 'none'}; add "
            f"environments.{served_name} to the release's values, or choose {alternative}"
        )
    if local_environment and not _matches_environment(local_environment, candidate):
        options, served_options = local_environment.options, candidate.options or {}
        raise ConfigError(
            f"environments.{name} is {local_environment.package} {json.dumps(options)}, but "
            f"'{served_name}' of release '{platform.release}' is {candidate.package} "
            f"{json.dumps(served_options)}; change one of them, or choose {alternative}"
        )
    fields = environment.model_dump(exclude=_LOCAL_FIELDS)
    return RemoteEnvironment(**{**fields, "kind": "remote", "address": candidate.address})


_LOCAL_FIELDS = set(LocalEnvironment.model_fields) - set(RemoteEnvironment.model_fields)


def _matches_environment(environment: LocalEnvironment, candidate: PlatformEnvironment) -> bool:
    """Return whether the candidate may be the environment; the release may not describe it."""
    has_same_package = candidate.package in (None, environment.package)
    return has_same_package and candidate.options in (None, environment.options)


def _find_unique_match(
    environment: LocalEnvironment, platform: Platform
) -> PlatformEnvironment | None:
    matches = [
        candidate
        for candidate in platform.environments.values()
        if candidate.package is not None and _matches_environment(environment, candidate)
    ]
    return matches[0] if len(matches) == 1 else None


def _choose_weight_store(weights: WeightStoreConfig, platform: Platform) -> WeightStoreConfig:
    """Return the run's S3 store, or the release's store with the settings of the run's store."""
    if isinstance(weights, S3WeightStore):
        return weights
    settings = {name: setting for name, setting in weights if name not in ("kind", "path")}
    return platform.weights.model_copy(update=settings)


# Parts of a RayJob.


def get_ray_cluster_spec(job: JsonObject) -> JsonObject:
    """Return the specification of the job's RayCluster."""
    return job["spec"]["rayClusterSpec"]


def get_head_template(job: JsonObject) -> JsonObject:
    """Return the head's pod template."""
    return get_ray_cluster_spec(job)["headGroupSpec"]["template"]


def get_worker_groups(job: JsonObject) -> list[JsonObject]:
    """Return the worker groups."""
    return get_ray_cluster_spec(job)["workerGroupSpecs"]


def get_pod_templates(job: JsonObject) -> list[JsonObject]:
    """Return the pod templates of the head and of each worker group."""
    return [get_head_template(job), *(group["template"] for group in get_worker_groups(job))]


def get_pod_containers(template: JsonObject) -> list[JsonObject]:
    """Return the containers of a pod template, the Ray container first."""
    return template["spec"]["containers"]


def count_max_workers(job: JsonObject, platform: Platform) -> int:
    """Return the number of rollout workers for which the job's RayCluster may start pods."""
    for group in get_worker_groups(job):
        if group.get("groupName") == ROLLOUT_GROUP:
            return group["maxReplicas"] * platform.rollout.per_pod
    return 0


def _size_groups(job: JsonObject, run: LanguageModelRun, platform: Platform) -> None:
    """Set the number of pods in each group from the run's learner ranks and rollout workers."""
    is_elastic = bool(get_ray_cluster_spec(job).get("enableInTreeAutoscaling"))
    for group in get_worker_groups(job):
        name = group.get("groupName")
        if name == LEARNER_GROUP:
            num_pods = math.ceil(run.learner.num_ranks / platform.learner.per_pod)
            group.update(replicas=num_pods, minReplicas=num_pods, maxReplicas=num_pods)
        elif name == ROLLOUT_GROUP:
            num_pods = math.ceil(run.rollout.num_workers / platform.rollout.per_pod)
            min_pods = math.ceil(run.rollout.min_workers / platform.rollout.per_pod)
            # KubeRay submits the job only when all `replicas` run, so that number does not include
            # workers that may join later. The maximum leaves room for `ludus scale`.
            max_pods = max(num_pods, group.get("maxReplicas") or 0)
            if not is_elastic:
                min_pods = max_pods = num_pods
            group.update(replicas=min_pods, minReplicas=min_pods, maxReplicas=max_pods)


def _insert_run_name(template: JsonObject, name: str) -> JsonObject:
    """Return a copy of the template in which the run's name replaces the placeholder."""
    new_names = {
        PLACEHOLDER: name,
        make_config_map_name(PLACEHOLDER): make_config_map_name(name),
        make_policy_name(PLACEHOLDER): make_policy_name(name),
    }
    template_json = json.dumps(template)
    for placeholder, new_name in new_names.items():
        template_json = template_json.replace(json.dumps(placeholder), json.dumps(new_name))
    return json.loads(template_json)


def _add_labels(manifest: JsonObject, labels: Mapping[str, str], namespace: str = "") -> None:
    metadata = manifest.setdefault("metadata", {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels}
    if namespace:
        metadata["namespace"] = namespace


def _copy_output_to_log(entrypoint: str) -> str:
    """Return a command that also copies the driver's output to its container's log.

    The driver is not its container's main process, so Ray writes its output only to a file that is
    deleted with the pod. `kubectl logs` and `ludus logs` read the container's log.
    """
    script = f"{CONTROL_VARIABLE}={CONFIG_FOLDER}/{CONTROL_KEY} {entrypoint} 2>&1"
    return f"bash -o pipefail -c {shlex.quote(f'{script} | tee {_CONTAINER_LOG}')}"


def _set_queue(job: JsonObject, queue: str) -> None:
    _add_labels(job, {QUEUE_LABEL: queue})
    if get_ray_cluster_spec(job).get("enableInTreeAutoscaling"):
        job["metadata"].setdefault("annotations", {})[ELASTIC_ANNOTATION] = "true"
