"""The runs of one namespace, through its API server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from ludus.proto.errors import ClusterError, ConfigError, NotFoundError, did_you_mean
from ludus.services.kubernetes.access import ApiAccess, load_access, load_kubeconfig_access
from ludus.services.kubernetes.api import JsonObject, KubernetesApi
from ludus.services.runs.manifest import RunManifests
from ludus.services.runs.names import (
    CLUSTER_LABEL,
    CONTROL_KEY,
    NODE_TYPE_LABEL,
    RAY_API,
    RUN_KEY,
    RUN_LABEL,
    RUNS_LABEL,
    config_map_name,
    core_path,
    job_path,
)
from ludus.services.runs.platform import Release, chosen_release

NOT_FOUND, CONFLICT, FORBIDDEN = 404, 409, 403
WAYS_OUT: Mapping[int, str] = {
    0: "check that the cluster runs, and that the kubeconfig's context names it (kubectl config "
    "get-contexts)",
    401: "log in to the cluster again, or check the user of the kubeconfig's context",
    FORBIDDEN: "ask for the Role that docs/submit.md names",
}
_GONE_TIMEOUT_S = 120.0
_POLL_S = 0.5


def personal_access(context: str = "") -> ApiAccess:
    """The access of whoever types: a kubeconfig where there is one, as with kubectl.

    Raises:
        ConfigError: there is no cluster to reach.
    """
    has_config = "KUBECONFIG" in os.environ or (Path.home() / ".kube" / "config").exists()
    try:
        return load_kubeconfig_access(None, context) if has_config else load_access(None, context)
    except ConfigError as error:
        raise ConfigError(
            f"no cluster can be reached: {error}; without a cluster train here, with `ludus train`"
        ) from error


@asynccontextmanager
async def connected(context: str = "", namespace: str = "") -> AsyncIterator[RunsCluster]:
    """The runs of a namespace; that of the context where none is named.

    Raises:
        ConfigError: there is no cluster to reach.
    """
    first = await asyncio.to_thread(personal_access, context)
    loaded = [first]

    def load() -> ApiAccess:
        return loaded.pop() if loaded else personal_access(context)

    async with KubernetesApi(load, remedies=WAYS_OUT) as api:
        yield RunsCluster(api, namespace or first.namespace or "default")


class RunsCluster:
    """What can be asked about runs, and done with them."""

    def __init__(self, api: KubernetesApi, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    async def release(self, wanted: str | None = None) -> Release:
        """The release with the wanted name, or the only one.

        Raises:
            NotFoundError: it is not there; says in which namespace one is.
            ConfigError: there are several.
        """
        found = await self._list(core_path(self.namespace, "configmaps"), f"{RUNS_LABEL}=true")
        try:
            return chosen_release(found, wanted, f"namespace '{self.namespace}'")
        except NotFoundError as error:
            elsewhere = await self._namespaces_with_releases()
            if not elsewhere:
                raise
            raise NotFoundError(f"{error}; there are releases in {elsewhere}") from None

    async def job(self, run: str) -> JsonObject:
        """The RayJob of a run.

        Raises:
            NotFoundError: there is none; names those that there are.
        """
        found = await self.find_job(run)
        if found is not None:
            return found
        names = [job["metadata"]["name"] for job in await self.jobs()]
        known = f"; there are {', '.join(sorted(names))}" if names else ""
        raise NotFoundError(
            f"no run '{run}' was found in namespace '{self.namespace}'; "
            f"{did_you_mean(run, names) or 'see: ludus list'}{known}"
        )

    async def find_job(self, run: str) -> JsonObject | None:
        """The RayJob of a run; None where there is none."""
        return await self._find(job_path(self.namespace, run))

    async def jobs(self) -> list[JsonObject]:
        """The RayJobs of all runs, oldest first."""
        found = await self._list(job_path(self.namespace), RUN_LABEL)
        return sorted(found, key=lambda job: str(job["metadata"].get("creationTimestamp", "")))

    async def config_maps(self) -> list[JsonObject]:
        """The ConfigMaps of all runs."""
        return await self._list(core_path(self.namespace, "configmaps"), RUN_LABEL)

    async def config_map(self, run: str) -> JsonObject | None:
        """The ConfigMap of a run; None where there is none."""
        return await self._find(core_path(self.namespace, "configmaps", config_map_name(run)))

    async def pods(self, ray_cluster: str) -> list[JsonObject]:
        """The pods of a RayCluster, the head's first."""
        if not ray_cluster:
            return []
        path = core_path(self.namespace, "pods")
        found = await self._list(path, f"{CLUSTER_LABEL}={ray_cluster}")
        return sorted(found, key=lambda pod: not is_head(pod))

    async def warnings_about(self, name: str) -> list[JsonObject]:
        """The newest warnings among the events of an object, oldest first; none if forbidden."""
        query = {"fieldSelector": f"involvedObject.name={name},type=Warning"}
        try:
            path = core_path(self.namespace, "events")
            found = (await self.api.read(path, query)).get("items") or []
        except ClusterError as error:
            if error.status != FORBIDDEN:
                raise
            return []
        return sorted(found, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""))

    async def create(self, manifests: RunManifests) -> JsonObject:
        """The RayJob as it was created, with its ConfigMap, which goes when it goes.

        Raises:
            ClusterError: the API server refused one of them; then neither is left.
        """
        config_maps = core_path(self.namespace, "configmaps")
        name = config_map_name(manifests.run.name)
        await self._put(config_maps, manifests.config_map)
        try:
            job = await self.api.create(job_path(self.namespace), manifests.job)
        except ClusterError:
            await self._remove(f"{config_maps}/{name}")
            raise
        owner = {
            "apiVersion": RAY_API,
            "kind": "RayJob",
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
        }
        await self.api.merge(f"{config_maps}/{name}", {"metadata": {"ownerReferences": [owner]}})
        return job

    async def delete(self, run: str, *, keep_config: bool = False) -> None:
        """Delete a RayJob and wait until it is gone; KubeRay ends its driver and its pods.

        Args:
            keep_config: leaves the ConfigMap, from which the run can be submitted again.
        """
        if keep_config and await self.config_map(run) is not None:
            path = core_path(self.namespace, "configmaps", config_map_name(run))
            await self.api.merge(path, {"metadata": {"ownerReferences": None}})
        await self._remove(job_path(self.namespace, run))
        try:
            async with asyncio.timeout(_GONE_TIMEOUT_S):
                while await self.find_job(run) is not None:
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ClusterError(
                f"expected RayJob '{run}' to be gone within {_GONE_TIMEOUT_S:.0f} s of its "
                "deletion, but it is not; see whether KubeRay's operator runs (kubectl get pods "
                "-A -l app.kubernetes.io/component=kuberay-operator)"
            ) from None

    async def want(self, run: str, control: str) -> None:
        """Write the run's control file, which its driver reads."""
        path = core_path(self.namespace, "configmaps", config_map_name(run))
        await self.api.merge(path, {"data": {CONTROL_KEY: control}})

    async def nudge(self, pod: str, moment: str) -> None:
        """Have a pod's mounted ConfigMaps renewed now and not within a minute, if allowed."""
        path = core_path(self.namespace, "pods", pod)
        try:
            await self.api.merge(path, {"metadata": {"annotations": {"ludus.dev/nudged": moment}}})
        except ClusterError as error:
            if error.status not in (FORBIDDEN, NOT_FOUND):
                raise

    async def _put(self, path: str, body: JsonObject) -> None:
        try:
            await self.api.create(path, body)
        except ClusterError as error:
            if error.status != CONFLICT:
                raise
            await self.api.replace(f"{path}/{body['metadata']['name']}", body)

    async def _remove(self, path: str) -> None:
        try:
            await self.api.delete(path)
        except ClusterError as error:
            if error.status != NOT_FOUND:
                raise

    async def _find(self, path: str) -> JsonObject | None:
        try:
            return await self.api.read(path)
        except ClusterError as error:
            if error.status != NOT_FOUND:
                raise
            return None

    async def _list(self, path: str, labels: str) -> list[JsonObject]:
        return (await self.api.read(path, {"labelSelector": labels})).get("items") or []

    async def _namespaces_with_releases(self) -> str:
        try:
            found = await self._list(core_path("", "configmaps"), f"{RUNS_LABEL}=true")
        except ClusterError:
            return ""
        return ", ".join(sorted({one["metadata"]["namespace"] for one in found}))


def is_head(pod: JsonObject) -> bool:
    """Whether a pod is the head of its RayCluster."""
    return (pod["metadata"].get("labels") or {}).get(NODE_TYPE_LABEL) == "head"


def run_config_in(config_map: JsonObject) -> str:
    """The run configuration that a run's ConfigMap holds.

    Raises:
        NotFoundError: it holds none.
    """
    text = (config_map.get("data") or {}).get(RUN_KEY)
    if not text:
        name = config_map["metadata"]["name"]
        raise NotFoundError(f"expected ConfigMap '{name}' to hold {RUN_KEY}, found none")
    return str(text)
