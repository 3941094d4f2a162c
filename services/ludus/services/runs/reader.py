"""A short-lived pod that sees the volume of runs: what a run left is there when its head is gone.

It is the release's head pod without Ray: the same image (its nodes have it already), volume,
security context, selectors and secrets for images; no credentials and no service account's token.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from ludus.proto.errors import ClusterError, ConfigError
from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.cluster import RunsCluster, is_head
from ludus.services.runs.manifest import head_template, pod_containers
from ludus.services.runs.names import RUN_LABEL, core_path
from ludus.services.runs.platform import Release
from ludus.services.runs.state import pod_troubles, state_of

START_TIMEOUT_S = 180.0
_LIFETIME_S = 900
_POLL_S = 0.5
_RESOURCES = {"cpu": "100m", "memory": "256Mi"}


@dataclass(frozen=True, slots=True)
class Place:
    """A container from which the folder of runs can be read."""

    pod: str
    container: str
    output_dir: str


@asynccontextmanager
async def reading_place(cluster: RunsCluster, release: Release, run: str) -> AsyncIterator[Place]:
    """The run's head while it lives, else a pod that is made and removed again.

    Raises:
        ConfigError: the release has no volume.
        ClusterError: the pod does not start; says why.
    """
    output_dir = release.platform.output_dir
    job = await cluster.find_job(run)
    pods = await cluster.pods(state_of(job).ray_cluster) if job else []
    for pod in pods:
        if is_head(pod) and (pod.get("status") or {}).get("phase") == "Running":
            container = pod["spec"]["containers"][0]["name"]
            yield Place(pod["metadata"]["name"], container, output_dir)
            return
    path = core_path(cluster.namespace, "pods")
    made = await cluster.api.create(path, reader_pod(release, run))
    name = made["metadata"]["name"]
    try:
        await _started(cluster, made)
        yield Place(name, "reader", output_dir)
    finally:
        with suppress(ClusterError):
            await cluster.api.delete(f"{path}/{name}", {"gracePeriodSeconds": 0})


def reader_pod(release: Release, run: str) -> JsonObject:
    """The pod.

    Raises:
        ConfigError: the release has no volume for runs.
    """
    template = copy.deepcopy(head_template(release.template))
    spec, (head, *_) = template["spec"], pod_containers(template)
    output_dir = release.platform.output_dir
    mounts = [m for m in head.get("volumeMounts") or [] if m.get("mountPath") == output_dir]
    if not mounts:
        raise ConfigError(
            f"release '{release.platform.release}' mounts no volume at {output_dir}: what its "
            "runs leave goes with their pods; set storage in its values"
        )
    names = {mount["name"] for mount in mounts}
    kept = ("securityContext", "nodeSelector", "tolerations", "affinity", "imagePullSecrets")
    container = {
        "name": "reader",
        "image": head.get("image"),
        "imagePullPolicy": head.get("imagePullPolicy", "IfNotPresent"),
        "command": ["python", "-c", f"import time; time.sleep({_LIFETIME_S})"],
        "securityContext": head.get("securityContext") or {},
        "resources": {"requests": _RESOURCES, "limits": _RESOURCES},
        "volumeMounts": mounts,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{run}-reader-",
            "namespace": release.platform.namespace,
            "labels": {RUN_LABEL: run, "app.kubernetes.io/component": "reader"},
        },
        "spec": {
            **{key: spec[key] for key in kept if key in spec},
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "activeDeadlineSeconds": _LIFETIME_S,
            "containers": [container],
            "volumes": [v for v in spec.get("volumes") or [] if v.get("name") in names],
        },
    }


async def _started(cluster: RunsCluster, pod: JsonObject) -> None:
    """Wait until the pod runs."""
    path = core_path(cluster.namespace, "pods", pod["metadata"]["name"])
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                pod = await cluster.api.read(path)
                phase = (pod.get("status") or {}).get("phase")
                if phase == "Running":
                    return
                if phase in ("Failed", "Succeeded"):
                    break
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        pass
    troubles = "; ".join(pod_troubles([pod])) or f"it is {(pod.get('status') or {}).get('phase')}"
    raise ClusterError(
        f"expected a pod that reads the volume to run within {START_TIMEOUT_S:.0f} s, got: "
        f"{troubles}"
    )
