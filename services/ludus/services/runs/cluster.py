"""The client for the runs in one namespace of a cluster."""

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
    RELEASE_LABEL,
    RUN_KEY,
    RUN_LABEL,
    RUNS_LABEL,
    explain_job_name_problem,
    make_config_map_name,
    make_core_path,
    make_job_path,
    make_policy_path,
)
from ludus.services.runs.platform import Release, choose_release

NO_RESPONSE, NOT_FOUND, CONFLICT, FORBIDDEN = 0, 404, 409, 403
REMEDIES: Mapping[int, str] = {
    NO_RESPONSE: "check that the cluster runs, and that the kubeconfig's context names it "
    "(kubectl config get-contexts)",
    401: "log in to the cluster again, or check the user of the kubeconfig's context",
    FORBIDDEN: "ask for the Role that docs/submit.md names",
}
_DELETION_TIMEOUT_S = 120.0
_POLL_INTERVAL_S = 0.5


def load_personal_access(context: str = "") -> ApiAccess:
    """Load the user's cluster credentials. Like kubectl, use the kubeconfig if there is one.

    Raises:
        ConfigError: no cluster is configured.
    """
    has_config = "KUBECONFIG" in os.environ or (Path.home() / ".kube" / "config").exists()
    try:
        return load_kubeconfig_access(None, context) if has_config else load_access(None, context)
    except ConfigError as error:
        raise ConfigError(
            f"no cluster is configured: {error}; to train on this machine, use `ludus train`"
        ) from error


@asynccontextmanager
async def connect_cluster(context: str = "", namespace: str = "") -> AsyncIterator[RunsCluster]:
    """Yield a client for the runs in a namespace; the default is the context's namespace.

    Raises:
        ConfigError: no cluster is configured.
    """
    access = await asyncio.to_thread(load_personal_access, context)
    async with KubernetesApi(lambda: load_personal_access(context), remedies=REMEDIES) as api:
        options = {"--namespace": namespace, "--context": context}
        option_text = "".join(f" {name} {value}" for name, value in options.items() if value)
        yield RunsCluster(api, namespace or access.namespace or "default", option_text)


class RunsCluster:
    """A client for the objects of runs in one namespace of a cluster."""

    def __init__(self, api: KubernetesApi, namespace: str, options: str = "") -> None:
        self.api = api
        self.namespace = namespace
        self._options = options

    def format_command(self, command: str) -> str:
        """Return a command for the user to enter, with the options that choose this cluster."""
        return f"ludus {command}{self._options}"

    async def read_release(self, name: str | None = None) -> Release:
        """Return the release with this name, or the only release.

        Raises:
            NotFoundError: there is no such release in the namespace.
            ConfigError: no name was given, and there are several releases.
        """
        config_maps = await self._list_objects(self._make_config_map_path(), f"{RUNS_LABEL}=true")
        try:
            return choose_release(config_maps, name, f"namespace '{self.namespace}'")
        except NotFoundError as error:
            namespaces = await self._list_release_namespaces()
            if not namespaces:
                raise
            raise NotFoundError(f"{error}; there are releases in {namespaces}") from None

    async def find_run_release(self, run: str, name: str | None = None) -> Release:
        """Return the release with this name; without a name, the release of the run.

        Raises:
            NotFoundError: there is no such release in the namespace.
            ConfigError: the run does not tell its release, and there are several.
        """
        owner = await self.find_config_map(run) or await self.find_job(run) or {}
        labels = (owner.get("metadata") or {}).get("labels") or {}
        return await self.read_release(name or labels.get(RELEASE_LABEL))

    async def read_job(self, run: str) -> JsonObject:
        """Return the RayJob of a run.

        Raises:
            NotFoundError: there is no such run.
        """
        job = await self.find_job(run)
        if job is None:
            raise await self.make_missing_error(run)
        return job

    async def make_missing_error(self, run: str) -> NotFoundError:
        """Return the error for a run that does not exist; it names the existing runs."""
        config_maps = await self.list_config_maps()
        names = {job["metadata"]["name"] for job in await self.list_jobs()}
        names |= {config_map["metadata"]["labels"][RUN_LABEL] for config_map in config_maps}
        names_text = f"; the namespace has {', '.join(sorted(names))}" if names else ""
        hint = did_you_mean(run, names) or f"see: {self.format_command('list')}"
        return NotFoundError(
            f"there is no run '{run}' in namespace '{self.namespace}'; {hint}{names_text}"
        )

    async def find_job(self, run: str) -> JsonObject | None:
        """Return the RayJob of a run, or None."""
        if explain_job_name_problem(run):
            return None  # the API server would take it for another path
        return await self.find_object(make_job_path(self.namespace, run))

    async def list_jobs(self) -> list[JsonObject]:
        """Return the RayJobs of all runs."""
        return await self._list_objects(make_job_path(self.namespace), RUN_LABEL)

    async def list_config_maps(self) -> list[JsonObject]:
        """Return the ConfigMaps of all runs."""
        return await self._list_objects(self._make_config_map_path(), RUN_LABEL)

    async def find_config_map(self, run: str) -> JsonObject | None:
        """Return the ConfigMap of a run, or None."""
        if explain_job_name_problem(run):
            return None
        return await self.find_object(self._make_config_map_path(run))

    async def list_pods(self, ray_cluster: str) -> list[JsonObject]:
        """Return the pods of a RayCluster, the head first."""
        if not ray_cluster:
            return []
        path = make_core_path(self.namespace, "pods")
        pods = await self._list_objects(path, f"{CLUSTER_LABEL}={ray_cluster}")
        return sorted(pods, key=lambda pod: not is_head(pod))

    async def list_heads(self) -> dict[str, JsonObject]:
        """Return the pods of all heads in the namespace, by the name of their RayCluster."""
        path = make_core_path(self.namespace, "pods")
        heads = await self._list_objects(path, f"{NODE_TYPE_LABEL}=head")
        return {head["metadata"]["labels"].get(CLUSTER_LABEL, ""): head for head in heads}

    async def list_warning_events(self, name: str) -> list[JsonObject]:
        """Return the warning events of an object, oldest first; [] if reading them is forbidden."""
        path = make_core_path(self.namespace, "events")
        query = {"fieldSelector": f"involvedObject.name={name},type=Warning"}
        try:
            events = (await self.api.read(path, query)).get("items") or []
        except ClusterError as error:
            if error.status != FORBIDDEN:
                raise
            return []
        return sorted(
            events, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or ""
        )

    async def create(self, manifests: RunManifests) -> JsonObject:
        """Create the RayJob and the objects that it owns; return the RayJob.

        Raises:
            ClusterError: a request was refused. If it created an object, the object is removed.
        """
        owned_objects = [(self._make_config_map_path(), manifests.config_map)]
        if manifests.network_policy is not None:
            owned_objects.append((make_policy_path(self.namespace), manifests.network_policy))
        created_paths, owned_paths = list[str](), list[str]()
        try:
            for list_path, manifest in owned_objects:
                path = f"{list_path}/{manifest['metadata']['name']}"
                owned_paths.append(path)
                if await self._create_or_replace(list_path, manifest):
                    created_paths.append(path)
            job = await self.api.create(make_job_path(self.namespace), manifests.job)
        except ClusterError:
            for path in created_paths:
                await self._delete_if_found(path)
            raise
        identity = {key: job["metadata"][key] for key in ("name", "uid")}
        owner = {"apiVersion": RAY_API, "kind": "RayJob", **identity}
        for path in owned_paths:
            await self.api.merge(path, {"metadata": {"ownerReferences": [owner]}})
        return job

    async def _create_or_replace(self, list_path: str, manifest: JsonObject) -> bool:
        """Create an object, or replace the object of its name; return whether it was created."""
        try:
            await self.api.create(list_path, manifest)
        except ClusterError as error:
            if error.status != CONFLICT:
                raise
            await self.api.replace(f"{list_path}/{manifest['metadata']['name']}", manifest)
            return False
        return True

    async def delete(self, run: str) -> None:
        """Delete a RayJob and wait until it is gone; KubeRay stops its driver and pods.

        The ConfigMap remains, so that the run can be resumed.
        """
        if await self.find_config_map(run) is not None:
            no_owner = {"metadata": {"ownerReferences": None}}
            await self.api.merge(self._make_config_map_path(run), no_owner)
        await self._delete_if_found(make_job_path(self.namespace, run))
        try:
            async with asyncio.timeout(_DELETION_TIMEOUT_S):
                while await self.find_job(run) is not None:
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            raise ClusterError(
                f"RayJob '{run}' still exists {_DELETION_TIMEOUT_S:.0f} s after its deletion; "
                "check that the KubeRay operator runs (kubectl get pods -A -l "
                "app.kubernetes.io/component=kuberay-operator)"
            ) from None
        try:
            # The garbage collector might otherwise delete the policy of a run that is resumed.
            await self._delete_if_found(make_policy_path(self.namespace, run))
        except ClusterError as error:
            if error.status != FORBIDDEN:
                raise

    async def write_control(self, run: str, control_json: str) -> None:
        """Write the run's control file, which its driver reads."""
        await self.api.merge(self._make_config_map_path(run), {"data": {CONTROL_KEY: control_json}})

    async def refresh_mounts(self, pod: str, timestamp: str) -> None:
        """Make the node update a pod's mounted ConfigMaps at once, if that is permitted."""
        path = make_core_path(self.namespace, "pods", pod)
        patch = {"metadata": {"annotations": {"ludus.dev/nudged": timestamp}}}
        try:
            await self.api.merge(path, patch)
        except ClusterError as error:
            if error.status not in (FORBIDDEN, NOT_FOUND):
                raise

    async def _delete_if_found(self, path: str) -> None:
        try:
            await self.api.delete(path)
        except ClusterError as error:
            if error.status != NOT_FOUND:
                raise

    async def find_object(self, path: str) -> JsonObject | None:
        """Return the object at a path of the API server, or None."""
        try:
            return await self.api.read(path)
        except ClusterError as error:
            if error.status != NOT_FOUND:
                raise
            return None

    def _make_config_map_path(self, run: str = "") -> str:
        """Return the API path of a run's ConfigMap, or of all ConfigMaps."""
        name = make_config_map_name(run) if run else ""
        return make_core_path(self.namespace, "configmaps", name)

    async def _list_objects(self, path: str, labels: str) -> list[JsonObject]:
        return (await self.api.read(path, {"labelSelector": labels})).get("items") or []

    async def _list_release_namespaces(self) -> str:
        path = make_core_path("", "configmaps")
        try:
            config_maps = await self._list_objects(path, f"{RUNS_LABEL}=true")
        except ClusterError:
            return ""
        namespaces = {config_map["metadata"]["namespace"] for config_map in config_maps}
        return ", ".join(sorted(namespaces))


def is_head(pod: JsonObject) -> bool:
    """Return whether a pod is the head of its RayCluster."""
    return (pod["metadata"].get("labels") or {}).get(NODE_TYPE_LABEL) == "head"


def read_run_config_json(config_map: JsonObject) -> str:
    """Return the run configuration in a run's ConfigMap.

    Raises:
        NotFoundError: the ConfigMap has none.
    """
    config_json = (config_map.get("data") or {}).get(RUN_KEY)
    if not config_json:
        name = config_map["metadata"]["name"]
        raise NotFoundError(f"ConfigMap '{name}' has no key {RUN_KEY}")
    return str(config_json)
