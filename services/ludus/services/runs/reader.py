"""A short-lived pod that reads the volume of runs after a run's head is gone.

The pod is the release's head pod without Ray. It has the same image (which the nodes already have),
volume, security context, node selectors and image pull secrets. It has no credentials and no
service account token.
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
from ludus.services.runs.state import pod_troubles, read_state

START_TIMEOUT_S = 180.0
_LIFETIME_S = 900
_POLL_S = 0.5
_RESOURCES = {"cpu": "100m", "memory": "256Mi"}


@dataclass(frozen=True, slots=True)
class VolumeReader:
    """A container that mounts the folder of runs."""

    pod: str
    container: str
    output_dir: str


@asynccontextmanager
async def open_reader(
    cluster: RunsCluster, release: Release, run: str
) -> AsyncIterator[VolumeReader]:
    """Yield the run's head if it is running, otherwise a temporary pod.

    Raises:
        ConfigError: the release has no volume.
        ClusterError: the temporary pod does not start.
    """
    output_dir = release.platform.output_dir
    job = await cluster.find_job(run)
    pods = await cluster.pods(read_state(job).ray_cluster) if job else []
    for pod in pods:
        if is_head(pod) and (pod.get("status") or {}).get("phase") == "Running":
            container = pod["spec"]["containers"][0]["name"]
            yield VolumeReader(pod["metadata"]["name"], container, output_dir)
            return
    path = core_path(cluster.namespace, "pods")
    pod = await cluster.api.create(path, reader_pod(release, run))
    name = pod["metadata"]["name"]
    try:
        await _wait_until_running(cluster, pod)
        yield VolumeReader(name, "reader", output_dir)
    finally:
        with suppress(ClusterError):
            await cluster.api.delete(f"{path}/{name}", {"gracePeriodSeconds": 0})


def reader_pod(release: Release, run: str) -> JsonObject:
    """Build the manifest of the temporary pod.

    Raises:
        ConfigError: the release has no volume for runs.
    """
    template = copy.deepcopy(head_template(release.template))
    spec, (head, *_) = template["spec"], pod_containers(template)
    output_dir = release.platform.output_dir
    mounts = [m for m in head.get("volumeMounts") or [] if m.get("mountPath") == output_dir]
    if not mounts:
        raise ConfigError(
            f"release '{release.platform.release}' mounts no volume at {output_dir}, so results "
            "are lost with the pods; set storage in the release's values"
        )
    names = {mount["name"] for mount in mounts}
    fields = ("securityContext", "nodeSelector", "tolerations", "affinity", "imagePullSecrets")
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
            **{key: spec[key] for key in fields if key in spec},
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "activeDeadlineSeconds": _LIFETIME_S,
            "containers": [container],
            "volumes": [v for v in spec.get("volumes") or [] if v.get("name") in names],
        },
    }


async def _wait_until_running(cluster: RunsCluster, pod: JsonObject) -> None:
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
    phase = (pod.get("status") or {}).get("phase")
    troubles = "; ".join(pod_troubles([pod])) or f"its phase is {phase}"
    raise ClusterError(
        f"the pod that reads the volume did not start within {START_TIMEOUT_S:.0f} s: {troubles}"
    )
