"""Questions to the cluster before a run is submitted, so that it does not fail after minutes.

Each check answers in sentences that say what is missing and the way out. What may not be looked
at is named and left to the cluster: nobody needs more rights for a check than for the run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludus.proto.errors import ClusterError, ConfigError
from ludus.services.kubernetes.api import JsonObject, resource_path
from ludus.services.runs.cluster import CONFLICT, FORBIDDEN, NOT_FOUND, RunsCluster
from ludus.services.runs.demand import (
    demands_of,
    device_shortages,
    quota_shortages,
    totals_of,
    why_no_node_fits,
)
from ludus.services.runs.manifest import RunManifests, pod_containers, pod_templates
from ludus.services.runs.names import QUEUE_LABEL, core_path, job_path
from ludus.services.runs.references import claims_in, secrets_in
from ludus.services.runs.rules import broken_rules

KUBERAY_INSTALL = (
    "helm install kuberay-operator kuberay/kuberay-operator --version 1.7.0 (docs/kubernetes.md)"
)
_KUEUE = "kueue.x-k8s.io"
_DRY_RUN = {"dryRun": "All", "fieldValidation": "Strict"}
_BAD_REQUEST = 400


@dataclass(slots=True)
class Preflight:
    """What was found."""

    problems: list[str] = field(default_factory=list)
    """What keeps the run from beginning, or from ending well."""
    notes: list[str] = field(default_factory=list)
    """What could not be looked at, or is worth knowing."""

    def raise_if_any(self) -> None:
        """Refuse the run where there are problems.

        Raises:
            ConfigError: there are; a line each.
        """
        if len(self.problems) == 1:
            raise ConfigError(self.problems[0])
        if self.problems:
            lines = "".join(f"\n  {problem}" for problem in self.problems)
            raise ConfigError(f"{len(self.problems)} things keep the run from beginning:{lines}")


class Note(str):
    """What a check found that keeps nothing from running."""


Check = Callable[[RunsCluster, RunManifests], AsyncIterator[str]]


async def preflight(
    cluster: RunsCluster, manifests: RunManifests, ignored: Sequence[str] = ()
) -> Preflight:
    """All checks but the ignored ones; without an operator the others make no sense.

    Raises:
        ConfigError: a name in `ignored` is no check's.
    """
    unknown = sorted(set(ignored) - set(CHECKS))
    if unknown:
        raise ConfigError(
            f"--ignore expected one of {', '.join(CHECKS)}, got '{unknown[0]}'; see docs/submit.md"
        )
    found = Preflight()
    for name, check in CHECKS.items():
        if name in ignored or (name == "admission" and found.problems):
            continue  # the API server would tell them again, in its own words
        try:
            async for said in check(cluster, manifests):
                (found.notes if isinstance(said, Note) else found.problems).append(said)
        except ClusterError as error:
            if error.status != FORBIDDEN:
                raise
            found.notes.append(f"check '{name}' is left out: this account may not look ({error})")
        if name == "operator" and found.problems:
            break
    return found


async def _operator(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    kinds = await _read(cluster, "/apis/ray.io/v1")
    names = {kind.get("name") for kind in (kinds or {}).get("resources") or []}
    if "rayjobs" not in names:
        yield (
            "the cluster knows no RayJob (ray.io/v1): KubeRay's operator is not installed; "
            f"install it with: {KUBERAY_INSTALL}"
        )


async def _rules(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    for said in [*broken_rules(manifests.job), *_local_paths(manifests), *_gpus_of_pods(manifests)]:
        yield said


def _local_paths(manifests: RunManifests) -> list[str]:
    path = str(getattr(manifests.run.model, "path", ""))
    is_here = path.startswith((".", "/", "~")) and not path.startswith(manifests.run.output_dir)
    if not is_here:
        return []
    return [
        f"model.path = '{path}' is a folder of this machine; name a model of the hub, or a folder "
        f"below {manifests.run.output_dir}, which all pods see"
    ]


def _gpus_of_pods(manifests: RunManifests) -> list[str]:
    wanted = {
        "learner": ("learner.num_gpus_per_rank", manifests.run.learner.num_gpus_per_rank),
        "rollout": ("rollout.num_gpus_per_worker", manifests.run.rollout.num_gpus_per_worker),
    }
    said = []
    for demand in demands_of(manifests.job):
        name, number = wanted.get(demand.role, ("", 0.0))
        if number > 0 and not any("gpu" in resource for resource in demand.requests):
            said.append(
                f"{name} = {number:g}, but the release's {demand.role} pods have no GPU; upgrade "
                f"it with values that give them one, or set {name}=0"
            )
    return said


async def _queue(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    queue = (manifests.job["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    if not queue:
        return
    group = await _read(cluster, f"/apis/{_KUEUE}")
    if group is None:
        yield (
            f"the run goes through queue '{queue}', but Kueue is not installed; install it, or "
            "remove the queue from the release's values"
        )
        return
    api = str((group.get("preferredVersion") or {}).get("groupVersion", f"{_KUEUE}/v1beta1"))
    local = await _read(cluster, resource_path(api, cluster.namespace, "localqueues", queue))
    if local is None:
        yield (
            f"there is no LocalQueue '{queue}' in namespace '{cluster.namespace}'; create it, or "
            "name another with --queue"
        )
        return
    name = str((local.get("spec") or {}).get("clusterQueue", ""))
    backing = await _read(cluster, resource_path(api, "", "clusterqueues", name))
    if backing is None:
        yield f"queue '{queue}' stands for ClusterQueue '{name}', which is not there; create it"
        return
    for said in _queue_shortages(queue, backing, manifests):
        yield said


def _queue_shortages(queue: str, backing: JsonObject, manifests: RunManifests) -> list[str]:
    from ludus.services.kubernetes.quantities import format_quantity, parse_quantity

    spec = backing.get("spec") or {}
    if spec.get("cohort") or spec.get("cohortName"):
        return []  # it may borrow
    most: dict[str, Any] = {}
    for group in spec.get("resourceGroups") or []:
        for flavor in group.get("flavors") or []:
            for resource in flavor.get("resources") or []:
                amount = parse_quantity(resource.get("nominalQuota", 0))
                most[resource["name"]] = most.get(resource["name"], 0) + amount
    totals = totals_of(demands_of(manifests.job))
    said = []
    for resource, quota in most.items():
        wanted = totals.get("pods" if resource == "pods" else f"requests.{resource}")
        if wanted is not None and wanted > quota:
            said.append(
                f"the run begins with {format_quantity(wanted, resource)} of {resource}, and queue "
                f"'{queue}' never gives more than {format_quantity(quota, resource)}: it would wait"
                " for ever; ask for more, or lower learner.num_ranks or rollout.min_workers"
            )
    return said


async def _secrets(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    for name, keys in secrets_in(manifests.job).items():
        found = await _read(cluster, core_path(cluster.namespace, "secrets", name))
        if found is None:
            literals = "".join(f" --from-literal={key}=..." for key in sorted(keys))
            yield (
                f"there is no Secret '{name}' in namespace '{cluster.namespace}'; create it with: "
                f"kubectl -n {cluster.namespace} create secret generic {name}{literals}"
            )
            continue
        missing = sorted(keys - set(found.get("data") or {}))
        if missing:
            yield f"Secret '{name}' has no key '{missing[0]}'; add it, or correct the values"


async def _volumes(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    for name in claims_in(manifests.job):
        path = core_path(cluster.namespace, "persistentvolumeclaims", name)
        found = await _read(cluster, path)
        if found is None:
            yield (
                f"there is no PersistentVolumeClaim '{name}' in namespace '{cluster.namespace}'; "
                "create it, or set storage in the release's values"
            )
            continue
        modes = set((found.get("spec") or {}).get("accessModes") or [])
        if (found.get("status") or {}).get("phase") == "Lost":
            yield f"PersistentVolumeClaim '{name}' has lost its volume; make another"
        elif modes and modes <= {"ReadOnlyMany"}:
            yield f"PersistentVolumeClaim '{name}' can only be read; a run writes: ReadWriteMany"


async def _nodes(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    nodes = (await cluster.api.read(resource_path("v1", "", "nodes"))).get("items") or []
    demands = demands_of(manifests.job)
    way_out = (
        "; correct the resources or node selectors of the release's values, or submit with "
        "--ignore nodes where nodes are added on demand"
    )
    missing = {why_no_node_fits(demand, nodes) for demand in demands if demand.count}
    for said in sorted(missing - {""}):
        yield said + way_out
    if not missing - {""}:
        for said in device_shortages(demands, nodes):
            yield said


async def _quotas(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    if QUEUE_LABEL in (manifests.job["metadata"].get("labels") or {}):
        return  # it waits in its queue until there is room
    path = core_path(cluster.namespace, "resourcequotas")
    totals = totals_of(demands_of(manifests.job))
    for quota in (await cluster.api.read(path)).get("items") or []:
        spec = quota.get("spec") or {}
        if not spec.get("scopes") and not spec.get("scopeSelector"):
            for said in quota_shortages(totals, quota):
                yield said


async def _admission(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    """Has the API server judge the objects without keeping them: schema, webhooks, policies."""
    said = await _refusal(cluster, job_path(cluster.namespace), manifests.job)
    if "unknown field" in said:
        yield Note(f"this version of KubeRay leaves out what it does not know: {said}")
    elif said:
        yield f"the API server refuses the RayJob: {said}"
    for template in pod_templates(manifests.job):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "generateName": f"{manifests.run.name}-preflight-",
                "labels": (template.get("metadata") or {}).get("labels") or {},
            },
            "spec": template.get("spec") or {},
        }
        said = await _refusal(cluster, core_path(cluster.namespace, "pods"), pod)
        if said:
            first = (pod_containers(template) or [{}])[0].get("name", "")
            yield f"the API server refuses the pod of container '{first}': {said}"


async def _refusal(cluster: RunsCluster, path: str, body: JsonObject) -> str:
    try:
        await cluster.api.create(path, body, _DRY_RUN)
    except ClusterError as error:
        may_not_ask = error.status == FORBIDDEN and "cannot create resource" in error.message
        cannot_say = error.status == _BAD_REQUEST and "dry run" in error.message
        # A run that is resumed has a RayJob of its name still.
        if may_not_ask or cannot_say or error.status in (0, NOT_FOUND, CONFLICT):
            return ""
        return error.message.partition(", got ")[2] or error.message
    return ""


async def _read(cluster: RunsCluster, path: str) -> JsonObject | None:
    try:
        return await cluster.api.read(path)
    except ClusterError as error:
        if error.status != NOT_FOUND:
            raise
        return None


CHECKS: dict[str, Check] = {
    "operator": _operator,
    "rules": _rules,
    "queue": _queue,
    "secrets": _secrets,
    "volumes": _volumes,
    "nodes": _nodes,
    "quota": _quotas,
    "admission": _admission,
}
