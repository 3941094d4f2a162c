"""From a run configuration and a release to the objects that a run is in a cluster.

    LanguageModelRun --in_cluster--> LanguageModelRun --+
                                          +--> make_manifests --> RayJob, ConfigMap
    Release --template-------------------+

Nothing here asks a cluster.
"""

from __future__ import annotations

import copy
import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ludus.proto.config import (
    FolderWeightStore,
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
    PLACEHOLDER,
    QUEUE_LABEL,
    RELEASE_LABEL,
    RUN_KEY,
    RUN_LABEL,
    config_map_name,
)
from ludus.services.runs.platform import Platform, PlatformEnvironment, Release, S3Weights

LEARNER_GROUP, ROLLOUT_GROUP = "learner", "rollout"
_CONTAINER_LOG = "/proc/1/fd/1"


@dataclass(frozen=True, slots=True)
class RunManifests:
    """What a run is in a cluster."""

    run: LanguageModelRun
    """As the trainer reads it there."""
    job: JsonObject
    config_map: JsonObject


def make_manifests(
    run: LanguageModelRun,
    release: Release,
    environments: Mapping[str, str] | None = None,
    queue: str | None = None,
) -> RunManifests:
    """The objects of a run.

    Args:
        environments: names of the release's environments, by the run's, where they differ.
        queue: Kueue's, in place of the release's.

    Raises:
        ConfigError: the release does not serve the run's environments.
    """
    run = in_cluster(run, release.platform, environments or {})
    job = _named(copy.deepcopy(release.template), run.name)
    labels = {RUN_LABEL: run.name, RELEASE_LABEL: release.platform.release}
    _label(job, labels, release.platform.namespace)
    job["spec"]["metadata"] = {**(job["spec"].get("metadata") or {}), "run_id": run.name}
    cluster = job["spec"].get("rayClusterSpec") or {}
    for template in pod_templates(job):
        _label(template, labels)
    _size_groups(cluster, run, release.platform)
    job["spec"]["entrypoint"] = _logged(str(job["spec"].get("entrypoint")))
    if queue is not None:
        _queue(job, queue)
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": config_map_name(run.name)},
        "data": {RUN_KEY: run.model_dump_json(indent=2)},
    }
    _label(config_map, labels, release.platform.namespace)
    return RunManifests(run, job, config_map)


def in_cluster(
    run: LanguageModelRun, platform: Platform, environments: Mapping[str, str]
) -> LanguageModelRun:
    """The run as it is played there: environments, folder and weights are the release's.

    Raises:
        ConfigError: the release does not serve its environments.
    """
    unknown = sorted(set(environments) - set(run.environments))
    if unknown:
        raise ConfigError(
            f"--environment {unknown[0]}=...: the run has no environment '{unknown[0]}'; it has "
            f"{', '.join(run.environments)}"
        )
    served = {
        name: _served(name, environment, platform, environments.get(name))
        for name, environment in run.environments.items()
    }
    update: dict[str, Any] = {
        "environments": served,
        "output_dir": platform.output_dir,
        "weights": _weights(run.weights, platform),
    }
    if platform.metrics_port and run.metrics.prometheus is None:
        sink = PrometheusSink(port=platform.metrics_port, host="0.0.0.0")
        update["metrics"] = run.metrics.model_copy(update={"prometheus": sink})
    return run.model_copy(update=update)


def _served(
    name: str,
    environment: LocalEnvironment | RemoteEnvironment,
    platform: Platform,
    wanted: str | None,
) -> LocalEnvironment | RemoteEnvironment:
    if isinstance(environment, RemoteEnvironment) and wanted is None:
        return environment
    found = platform.environments.get(wanted or name)
    if found is None and wanted is None and isinstance(environment, LocalEnvironment):
        found = _only_one_like(environment, platform)
    if found is None:
        raise ConfigError(
            f"environments.{name}: release '{platform.release}' serves no environment "
            f"'{wanted or name}', but {', '.join(platform.environments) or 'none'}; add it to the "
            f"release's values as environments.{wanted or name}, or name another with "
            f"--environment {name}=NAME"
        )
    if isinstance(environment, LocalEnvironment) and not _is_like(environment, found):
        raise ConfigError(
            f"environments.{name} plays {environment.package} {json.dumps(environment.options)}, "
            f"but '{wanted or name}' of release '{platform.release}' is {found.package} "
            f"{json.dumps(found.options or {})}; change the one or the other, or name another "
            f"with --environment {name}=NAME"
        )
    shared = environment.model_dump(exclude=_FIELDS_OF_LOCAL)
    return RemoteEnvironment(**{**shared, "kind": "remote", "address": found.address})


_FIELDS_OF_LOCAL = set(LocalEnvironment.model_fields) - set(RemoteEnvironment.model_fields)


def _is_like(environment: LocalEnvironment, served: PlatformEnvironment) -> bool:
    """Whether both are the same game, as far as the release says what it serves."""
    return served.package in (None, environment.package) and served.options in (
        None,
        environment.options,
    )


def _only_one_like(environment: LocalEnvironment, platform: Platform) -> PlatformEnvironment | None:
    alike = [
        served
        for served in platform.environments.values()
        if served.package is not None and _is_like(environment, served)
    ]
    return alike[0] if len(alike) == 1 else None


def _weights(weights: WeightStoreConfig, platform: Platform) -> WeightStoreConfig:
    """The release's store, with what the run says of versions and times; its own bucket stays."""
    if isinstance(weights, S3WeightStore):
        return weights
    shared = weights.model_dump(exclude={"kind", "path"})
    if isinstance(platform.weights, S3Weights):
        return S3WeightStore(**shared, **platform.weights.model_dump())
    return FolderWeightStore(**shared)


# The parts of a RayJob.


def head_template(job: JsonObject) -> JsonObject:
    """The head's pod template; empty where there is none."""
    cluster = job["spec"].get("rayClusterSpec") or {}
    return (cluster.get("headGroupSpec") or {}).get("template") or {}


def worker_groups(job: JsonObject) -> list[JsonObject]:
    """The groups of workers."""
    return (job["spec"].get("rayClusterSpec") or {}).get("workerGroupSpecs") or []


def pod_templates(job: JsonObject) -> list[JsonObject]:
    """The pod templates: the head's, then those of the workers."""
    found = [head_template(job), *(group.get("template") or {} for group in worker_groups(job))]
    return [template for template in found if template]


def pod_containers(template: JsonObject) -> list[JsonObject]:
    """The containers of a pod template, Ray's first."""
    return (template.get("spec") or {}).get("containers") or []


def _size_groups(cluster: JsonObject, run: LanguageModelRun, platform: Platform) -> None:
    """Give the groups as many pods as the run has learner ranks and rollout workers."""
    is_elastic = bool(cluster.get("enableInTreeAutoscaling"))
    for group in cluster.get("workerGroupSpecs") or []:
        name = group.get("groupName")
        if name == LEARNER_GROUP:
            size = math.ceil(run.learner.num_ranks / platform.learner.per_pod)
            group.update(replicas=size, minReplicas=size, maxReplicas=size)
        elif name == ROLLOUT_GROUP:
            wanted = math.ceil(run.rollout.num_workers / platform.rollout.per_pod)
            least = math.ceil(run.rollout.min_workers / platform.rollout.per_pod)
            # KubeRay submits the job when all replicas are there: what can come later must
            # not be among them. Room above what the run begins with is left to `ludus scale`.
            most = max(wanted, group.get("maxReplicas") or 0)
            if not is_elastic:
                least = most = wanted
            group.update(replicas=least, minReplicas=least, maxReplicas=most)


def _named(template: JsonObject, name: str) -> JsonObject:
    """The template, with the run's name where its placeholder stands alone."""
    replaced = {PLACEHOLDER: name, config_map_name(PLACEHOLDER): config_map_name(name)}
    named = _mapped(template, lambda text: replaced.get(text, text))
    assert isinstance(named, dict)
    return named


def _mapped(node: Any, change: Callable[[str], str]) -> Any:
    if isinstance(node, dict):
        return {key: _mapped(value, change) for key, value in node.items()}
    if isinstance(node, list):
        return [_mapped(value, change) for value in node]
    return change(node) if isinstance(node, str) else node


def _label(found: JsonObject, labels: Mapping[str, str], namespace: str = "") -> None:
    metadata = found.setdefault("metadata", {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels}
    if namespace:
        metadata["namespace"] = namespace


def _logged(entrypoint: str) -> str:
    """The driver's command, with what it says in its container's log as well.

    The driver is no container's main process: by itself, what it writes goes to a file of Ray's
    that is gone with the pod. In the log, `kubectl logs` and `ludus logs` find it.
    """
    script = f"{CONTROL_VARIABLE}={CONFIG_FOLDER}/{CONTROL_KEY} {entrypoint} 2>&1"
    return f"bash -o pipefail -c {shlex.quote(f'{script} | tee {_CONTAINER_LOG}')}"


def _queue(job: JsonObject, queue: str) -> None:
    _label(job, {QUEUE_LABEL: queue})
    if (job["spec"].get("rayClusterSpec") or {}).get("enableInTreeAutoscaling"):
        metadata = job["metadata"]
        metadata["annotations"] = {
            **(metadata.get("annotations") or {}),
            ELASTIC_ANNOTATION: "true",
        }
