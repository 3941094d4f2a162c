"""Checks of the cluster before a run is submitted, so that the run does not fail minutes later.

Each check yields messages with the problem and its remedy. A check that the account may not perform
is skipped with a note: checks need no more rights than the run itself. The dry run of `admission`
finds what the API server refuses. The other checks find what would show only later, in a RayJob
that KubeRay refuses or in pods that wait.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from ludus.proto.errors import ClusterError, ConfigError
from ludus.services.kubernetes.api import JsonObject, resource_path
from ludus.services.kubernetes.quantities import format_quantity, parse_quantity
from ludus.services.runs.cluster import CONFLICT, FORBIDDEN, NOT_FOUND, RunsCluster
from ludus.services.runs.demand import (
    device_shortages,
    node_problems,
    pod_demands,
    quota_shortages,
    total_demand,
)
from ludus.services.runs.manifest import (
    RunManifests,
    pod_containers,
    pod_templates,
    ray_cluster,
    worker_groups,
)
from ludus.services.runs.names import (
    ELASTIC_ANNOTATION,
    QUEUE_LABEL,
    core_path,
    job_name_problem,
    job_path,
)

KUBERAY_INSTALL = (
    "helm install kuberay-operator kuberay/kuberay-operator --version 1.7.0 (docs/kubernetes.md)"
)
_KUEUE = "kueue.x-k8s.io"
_DRY_RUN = {"dryRun": "All", "fieldValidation": "Strict"}
_BAD_REQUEST = 400
_SECRET_FIELDS = ("imagePullSecrets", "secret", "secretKeyRef", "secretRef")
"""Fields of a pod that refer to Secrets."""


@dataclass(slots=True)
class ClusterFindings:
    """The messages of all checks."""

    problems: list[str] = field(default_factory=list)
    """Reasons why the run would not start, or would fail."""
    notes: list[str] = field(default_factory=list)
    """Skipped checks and other information."""

    def raise_if_any(self) -> None:
        """Refuse the run if there are problems.

        Raises:
            ConfigError: there are problems, one per line.
        """
        if len(self.problems) == 1:
            raise ConfigError(self.problems[0])
        if self.problems:
            lines = "".join(f"\n  {problem}" for problem in self.problems)
            raise ConfigError(f"{len(self.problems)} problems prevent the run:{lines}")


class Note(str):
    """A message that does not prevent the run."""


Check = Callable[[RunsCluster, RunManifests], AsyncIterator[str]]


async def check_cluster(
    cluster: RunsCluster, manifests: RunManifests, ignored: Sequence[str] = ()
) -> ClusterFindings:
    """Run all checks except the ignored ones; without the operator, skip the rest.

    Raises:
        ConfigError: a name in `ignored` is not the name of a check.
    """
    unknown_checks = sorted(set(ignored) - set(CHECKS))
    if unknown_checks:
        raise ConfigError(
            f"--ignore must be one of {', '.join(CHECKS)}, got '{unknown_checks[0]}'; see "
            "docs/submit.md"
        )
    findings = ClusterFindings()
    for name, check in CHECKS.items():
        if name in ignored or (name == "admission" and findings.problems):
            continue  # the API server would report the same problems again
        try:
            async for message in check(cluster, manifests):
                (findings.notes if isinstance(message, Note) else findings.problems).append(message)
        except ClusterError as error:
            if error.status != FORBIDDEN:
                raise
            findings.notes.append(f"check '{name}' is skipped: no permission ({error})")
        if name == "operator" and findings.problems:
            break
    return findings


async def _check_operator(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    api_group = await cluster.find("/apis/ray.io/v1") or {}
    if "rayjobs" not in {resource.get("name") for resource in api_group.get("resources") or []}:
        yield (
            "the cluster does not support RayJobs (ray.io/v1), because the KubeRay operator is not "
            f"installed; install it with: {KUBERAY_INSTALL}"
        )


async def _check_rules(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    for message in broken_rules(manifests):
        yield message


def broken_rules(manifests: RunManifests) -> Iterator[str]:
    """Yield a message for each rule that the API server does not check."""
    job, run = manifests.job, manifests.run
    spec, cluster = job["spec"], ray_cluster(job)
    if problem := job_name_problem(run.name):
        yield problem
    shuts_down = spec.get("shutdownAfterJobFinishes")
    if shuts_down and (spec.get("deletionStrategy") or {}).get("deletionRules"):
        yield (
            "shutdownAfterJobFinishes and deletionStrategy.deletionRules exclude each other; "
            "remove one from the RayJob"
        )
    queue = job["metadata"]["labels"].get(QUEUE_LABEL)
    if queue and not shuts_down:
        yield f"a run in queue '{queue}' needs shutdownAfterJobFinishes: true; set it"
    is_elastic = (job["metadata"].get("annotations") or {}).get(ELASTIC_ANNOTATION) == "true"
    if queue and cluster.get("enableInTreeAutoscaling") and not is_elastic:
        yield (
            f"a run in queue '{queue}' with autoscaling needs the annotation "
            f'{ELASTIC_ANNOTATION}: "true"; set it, or disable autoscaling'
        )
    for group in worker_groups(job):
        minimum, maximum = group["minReplicas"], group["maxReplicas"]
        if not minimum <= group["replicas"] <= maximum:
            yield (
                f"worker group '{group['groupName']}': replicas {group['replicas']} must be "
                f"between {minimum} and {maximum}"
            )
    yield from _find_missing_gpus(manifests)
    path = str(getattr(run.model, "path", ""))
    if path.startswith((".", "/", "~")) and not path.startswith(run.output_dir):
        yield (
            f"model.path = '{path}' is a folder of this machine; name a model of the hub, or a "
            f"folder below {run.output_dir}, which all pods share"
        )


def _find_missing_gpus(manifests: RunManifests) -> Iterator[str]:
    gpus = {
        "learner": ("learner.num_gpus_per_rank", manifests.run.learner.num_gpus_per_rank),
        "rollout": ("rollout.num_gpus_per_worker", manifests.run.rollout.num_gpus_per_worker),
    }
    for demand in pod_demands(manifests.job):
        name, num_gpus = gpus.get(demand.role, ("", 0.0))
        if num_gpus > 0 and not any("gpu" in resource for resource in demand.requests):
            yield (
                f"{name} = {num_gpus:g}, but the release's {demand.role} pods have no GPU; upgrade "
                f"the release with values that give them one, or set {name}=0"
            )


async def _check_queue(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    queue = manifests.job["metadata"]["labels"].get(QUEUE_LABEL)
    if not queue:
        return
    group = await cluster.find(f"/apis/{_KUEUE}")
    if group is None:
        yield (
            f"the run uses queue '{queue}', but Kueue is not installed; install it, or remove the "
            "queue from the release's values"
        )
        return
    api = str((group.get("preferredVersion") or {}).get("groupVersion", f"{_KUEUE}/v1beta1"))
    local = await cluster.find(resource_path(api, cluster.namespace, "localqueues", queue))
    if local is None:
        yield (
            f"there is no LocalQueue '{queue}' in namespace '{cluster.namespace}'; create it, or "
            "choose another with --queue"
        )
        return
    name = local["spec"]["clusterQueue"]
    cluster_queue = await cluster.find(resource_path(api, "", "clusterqueues", name))
    if cluster_queue is None:
        yield f"queue '{queue}' uses ClusterQueue '{name}', which does not exist; create it"
        return
    totals = total_demand(pod_demands(manifests.job))
    for resource, quota in _sum_nominal_quotas(cluster_queue["spec"]).items():
        amount = totals.get("pods" if resource == "pods" else f"requests.{resource}", Decimal(0))
        if amount > quota:
            yield (
                f"the run would wait forever: it starts with {format_quantity(amount, resource)}"
                f" of {resource}, but queue '{queue}' has {format_quantity(quota, resource)} in "
                "total; request a larger quota, or lower learner.num_ranks or rollout.min_workers"
            )


def _sum_nominal_quotas(spec: JsonObject) -> dict[str, Decimal]:
    """Return the quota of each resource in all flavors; empty if the queue may borrow."""
    quotas: dict[str, Decimal] = {}
    if spec.get("cohort") or spec.get("cohortName"):
        return quotas
    for group in spec.get("resourceGroups") or []:
        for flavor in group["flavors"]:
            for resource in flavor["resources"]:
                amount = parse_quantity(resource["nominalQuota"])
                quotas[resource["name"]] = quotas.get(resource["name"], Decimal(0)) + amount
    return quotas


async def _check_secrets(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    for name, keys in _required_secrets(manifests.job).items():
        secret = await cluster.find(core_path(cluster.namespace, "secrets", name))
        if secret is None:
            literals = "".join(f" --from-literal={key}=..." for key in sorted(keys))
            yield (
                f"there is no Secret '{name}' in namespace '{cluster.namespace}'; create it with: "
                f"kubectl -n {cluster.namespace} create secret generic {name}{literals}"
            )
            continue
        missing_keys = sorted(keys - set(secret.get("data") or {}))
        if missing_keys:
            yield f"Secret '{name}' has no key '{missing_keys[0]}'; add it, or correct the values"


def _required_secrets(job: JsonObject) -> dict[str, set[str]]:
    """Return the names of the Secrets that the pods need to start, with the keys of each."""
    keys_by_secret: dict[str, set[str]] = {}
    for reference in _find_fields(pod_templates(job), _SECRET_FIELDS):
        if not reference.get("optional"):
            name = reference.get("secretName") or reference["name"]
            keys = {
                item["key"] for item in (reference, *reference.get("items", ())) if "key" in item
            }
            keys_by_secret.setdefault(name, set()).update(keys)
    return keys_by_secret


def _find_fields(tree: Any, names: Sequence[str]) -> Iterator[JsonObject]:
    """Yield the objects in all fields of these names, at any depth."""
    if isinstance(tree, list):
        for item in tree:
            yield from _find_fields(item, names)
    elif isinstance(tree, dict):
        for name, child in tree.items():
            if name in names:
                yield from child if isinstance(child, list) else [child]
            else:
                yield from _find_fields(child, names)


async def _check_volumes(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    references = _find_fields(pod_templates(manifests.job), ["persistentVolumeClaim"])
    for name in sorted({reference["claimName"] for reference in references}):
        claim = await cluster.find(core_path(cluster.namespace, "persistentvolumeclaims", name))
        if claim is None:
            yield (
                f"there is no PersistentVolumeClaim '{name}' in namespace '{cluster.namespace}'; "
                "create it, or set storage in the release's values"
            )
        elif (claim.get("status") or {}).get("phase") == "Lost":
            yield f"PersistentVolumeClaim '{name}' has lost its volume; create another"
        elif claim["spec"].get("accessModes") == ["ReadOnlyMany"]:
            yield f"PersistentVolumeClaim '{name}' is read-only; a run needs ReadWriteMany"


async def _check_nodes(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    nodes = (await cluster.api.read(resource_path("v1", "", "nodes"))).get("items") or []
    demands = pod_demands(manifests.job)
    problems = list(node_problems(demands, nodes))
    for problem in problems:
        yield (
            f"{problem}; correct the resources or node selectors of the release's values, or "
            "submit with --ignore nodes if nodes are added on demand"
        )
    if not problems:
        for message in device_shortages(total_demand(demands), nodes):
            yield message


async def _check_quotas(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    if QUEUE_LABEL in manifests.job["metadata"]["labels"]:
        return  # the run waits in its queue until there is room
    totals = total_demand(pod_demands(manifests.job))
    path = core_path(cluster.namespace, "resourcequotas")
    for quota in (await cluster.api.read(path)).get("items") or []:
        if not quota["spec"].get("scopes") and not quota["spec"].get("scopeSelector"):
            for message in quota_shortages(totals, quota):
                yield message


async def _check_admission(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    """Validate the objects by a dry run on the API server: schema, webhooks and policies."""
    refusal = await _refusal(cluster, job_path(cluster.namespace), manifests.job)
    if "unknown field" in refusal:
        yield Note(f"this version of KubeRay ignores unknown fields: {refusal}")
    elif refusal:
        yield f"the API server refuses the RayJob: {refusal}"
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
        refusal = await _refusal(cluster, core_path(cluster.namespace, "pods"), pod)
        if refusal:
            container = (pod_containers(template) or [{}])[0].get("name", "")
            yield f"the API server refuses the pod of container '{container}': {refusal}"


async def _refusal(cluster: RunsCluster, path: str, body: JsonObject) -> str:
    """Return why the API server refuses an object; '' if it accepts it or cannot answer."""
    try:
        await cluster.api.create(path, body, _DRY_RUN)
    except ClusterError as error:
        is_forbidden = error.status == FORBIDDEN and "cannot create resource" in error.message
        is_unsupported = error.status == _BAD_REQUEST and "dry run" in error.message
        # When a run is resumed, the RayJob of the same name still exists (CONFLICT).
        if is_forbidden or is_unsupported or error.status in (0, NOT_FOUND, CONFLICT):
            return ""
        _, separator, reason = error.message.partition(f": {error.status} ")
        return f"{error.status} {reason}" if separator else error.message
    return ""


CHECKS: dict[str, Check] = {
    "operator": _check_operator,
    "rules": _check_rules,
    "queue": _check_queue,
    "secrets": _check_secrets,
    "volumes": _check_volumes,
    "nodes": _check_nodes,
    "quota": _check_quotas,
    "admission": _check_admission,
}
