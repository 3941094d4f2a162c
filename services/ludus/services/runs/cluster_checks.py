"""Checks of the cluster before a run is submitted, so that a run does not fail minutes later.

Each check yields messages with a problem and its remedy. If the user's account lacks a permission,
the check is skipped with a note, because the run itself may not need that permission. The
`admission` check makes a dry run, so it finds what the API server would refuse. The other checks
find problems that would appear later, as a RayJob that KubeRay refuses or as pods that wait.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from ludus.proto.errors import ClusterError, ConfigError
from ludus.services.kubernetes.api import JsonObject, make_resource_path
from ludus.services.kubernetes.quantities import format_quantity, parse_quantity
from ludus.services.runs.cluster import CONFLICT, FORBIDDEN, NOT_FOUND, RunsCluster
from ludus.services.runs.demand import (
    compute_pod_demands,
    find_device_shortages,
    find_node_problems,
    find_quota_shortages,
    sum_demands,
)
from ludus.services.runs.manifest import (
    RunManifests,
    get_pod_containers,
    get_pod_templates,
    get_ray_cluster_spec,
    get_worker_groups,
)
from ludus.services.runs.names import (
    ELASTIC_ANNOTATION,
    QUEUE_LABEL,
    explain_job_name_problem,
    make_core_path,
    make_job_path,
    make_policy_path,
)

KUBERAY_INSTALL = (
    "helm install kuberay-operator kuberay/kuberay-operator --version 1.6.2 (docs/kubernetes.md)"
)
_KUEUE = "kueue.x-k8s.io"
_DRY_RUN = {"dryRun": "All", "fieldValidation": "Strict"}
_SECRET_FIELDS = ("imagePullSecrets", "secret", "secretKeyRef", "secretRef")
"""Fields of a pod that refer to Secrets."""


@dataclass(slots=True)
class ClusterFindings:
    """The problems and notes of all checks."""

    problems: list[str] = field(default_factory=list)
    """Reasons why the run would not start or would fail, with remedies."""
    notes: list[str] = field(default_factory=list)
    """Skipped checks and other information."""

    def raise_problems(self) -> None:
        """Raise a ConfigError that lists the problems, one per line, if there are any."""
        if len(self.problems) == 1:
            raise ConfigError(self.problems[0])
        if self.problems:
            lines = "".join(f"\n  {problem}" for problem in self.problems)
            raise ConfigError(f"{len(self.problems)} problems prevent the run:{lines}")


class Note(str):
    """A message about something that does not prevent the run."""


Check = Callable[[RunsCluster, RunManifests], AsyncIterator[str]]


async def check_cluster(
    cluster: RunsCluster, manifests: RunManifests, ignored_checks: Sequence[str] = ()
) -> ClusterFindings:
    """Run all checks except the ignored ones, and return their findings.

    If the operator is not installed, the other checks are skipped.

    Raises:
        ConfigError: a name in `ignored_checks` is not the name of a check.
    """
    unknown_checks = sorted(set(ignored_checks) - set(CHECKS))
    if unknown_checks:
        raise ConfigError(
            f"--ignore must be one of {', '.join(CHECKS)}, got '{unknown_checks[0]}'; see "
            "docs/submit.md"
        )
    findings = ClusterFindings()
    for name, check in CHECKS.items():
        if name in ignored_checks or (name == "admission" and findings.problems):
            continue  # the dry run would only repeat the problems
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
    api_group = await cluster.find_object("/apis/ray.io/v1") or {}
    if "rayjobs" not in {resource.get("name") for resource in api_group.get("resources") or []}:
        yield (
            "the cluster does not support RayJobs (ray.io/v1), because the KubeRay operator is not "
            f"installed; install it with: {KUBERAY_INSTALL}"
        )


async def _check_rules(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    for message in find_broken_rules(manifests):
        yield message


def find_broken_rules(manifests: RunManifests) -> Iterator[str]:
    """Yield a message for each violation of a rule that the API server does not check."""
    job, run = manifests.job, manifests.run
    spec, cluster_spec = job["spec"], get_ray_cluster_spec(job)
    if problem := explain_job_name_problem(run.name):
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
    if queue and cluster_spec.get("enableInTreeAutoscaling") and not is_elastic:
        yield (
            f"a run in queue '{queue}' with autoscaling needs the annotation "
            f'{ELASTIC_ANNOTATION}: "true"; set it, or disable autoscaling'
        )
    for group in get_worker_groups(job):
        min_replicas, max_replicas = group["minReplicas"], group["maxReplicas"]
        if not min_replicas <= group["replicas"] <= max_replicas:
            yield (
                f"worker group '{group['groupName']}': replicas {group['replicas']} must be "
                f"between {min_replicas} and {max_replicas}"
            )
    yield from _find_missing_gpus(manifests)
    model_path = str(getattr(run.model, "path", ""))
    if model_path.startswith((".", "/", "~")) and not model_path.startswith(run.output_dir):
        yield (
            f"model.path = '{model_path}' is a folder of this machine; name a model of the hub, or "
            f"a folder below {run.output_dir}, which all pods share"
        )


def _find_missing_gpus(manifests: RunManifests) -> Iterator[str]:
    run = manifests.run
    gpu_fields = {
        "learner": ("learner.num_gpus_per_rank", run.learner.num_gpus_per_rank),
        "rollout": ("rollout.num_gpus_per_worker", run.rollout.num_gpus_per_worker),
    }
    for demand in compute_pod_demands(manifests.job):
        name, num_gpus = gpu_fields.get(demand.role, ("", 0.0))
        if num_gpus > 0 and not any("gpu" in resource for resource in demand.requests):
            yield (
                f"{name} = {num_gpus:g}, but the release's {demand.role} pods have no GPU; upgrade "
                f"the release with values that give them one, or set {name}=0"
            )


async def _check_queue(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    queue = manifests.job["metadata"]["labels"].get(QUEUE_LABEL)
    if not queue:
        return
    api_group = await cluster.find_object(f"/apis/{_KUEUE}")
    if api_group is None:
        yield (
            f"the run uses queue '{queue}', but Kueue is not installed; install it, or remove the "
            "queue from the release's values"
        )
        return
    preferred_version = api_group.get("preferredVersion") or {}
    api_version = str(preferred_version.get("groupVersion", f"{_KUEUE}/v1beta1"))
    path = make_resource_path(api_version, cluster.namespace, "localqueues", queue)
    local_queue = await cluster.find_object(path)
    if local_queue is None:
        yield (
            f"there is no LocalQueue '{queue}' in namespace '{cluster.namespace}'; create it, or "
            "choose another with --queue"
        )
        return
    name = local_queue["spec"]["clusterQueue"]
    path = make_resource_path(api_version, "", "clusterqueues", name)
    cluster_queue = await cluster.find_object(path)
    if cluster_queue is None:
        yield f"queue '{queue}' uses ClusterQueue '{name}', which does not exist; create it"
        return
    totals = sum_demands(compute_pod_demands(manifests.job))
    for resource, quota in _sum_nominal_quotas(cluster_queue["spec"]).items():
        name = resource if resource == "pods" else f"requests.{resource}"
        amount = totals.get(name, Decimal(0))
        if amount > quota:
            yield (
                f"the run would wait forever: it starts with {format_quantity(amount, resource)}"
                f" of {resource}, but queue '{queue}' has {format_quantity(quota, resource)} in "
                "total; request a larger quota, or lower learner.num_ranks or rollout.min_workers"
            )


def _sum_nominal_quotas(spec: JsonObject) -> dict[str, Decimal]:
    """Return the quota of each resource, summed over flavors; {} if the queue may borrow."""
    quotas: dict[str, Decimal] = {}
    if spec.get("cohort") or spec.get("cohortName"):
        return quotas
    for resource_group in spec.get("resourceGroups") or []:
        for flavor in resource_group["flavors"]:
            for resource in flavor["resources"]:
                amount = parse_quantity(resource["nominalQuota"])
                quotas[resource["name"]] = quotas.get(resource["name"], Decimal(0)) + amount
    return quotas


async def _check_secrets(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    for name, keys in _find_required_secrets(manifests.job).items():
        secret = await cluster.find_object(make_core_path(cluster.namespace, "secrets", name))
        if secret is None:
            literal_options = "".join(f" --from-literal={key}=..." for key in sorted(keys))
            yield (
                f"there is no Secret '{name}' in namespace '{cluster.namespace}'; create it with: "
                f"kubectl -n {cluster.namespace} create secret generic {name}{literal_options}"
            )
            continue
        missing_keys = sorted(keys - set(secret.get("data") or {}))
        if missing_keys:
            yield f"Secret '{name}' has no key '{missing_keys[0]}'; add it, or correct the values"


def _find_required_secrets(job: JsonObject) -> dict[str, set[str]]:
    """Return the required keys of each Secret that the pods need, by the Secret's name."""
    keys_by_secret: dict[str, set[str]] = {}
    for reference in _find_fields(get_pod_templates(job), _SECRET_FIELDS):
        if not reference.get("optional"):
            name = reference.get("secretName") or reference["name"]
            key_fields = (reference, *reference.get("items", ()))
            keys = {key_field["key"] for key_field in key_fields if "key" in key_field}
            keys_by_secret.setdefault(name, set()).update(keys)
    return keys_by_secret


def _find_fields(json_value: Any, names: Sequence[str]) -> Iterator[JsonObject]:
    """Yield the objects in all fields with these names, at any depth."""
    if isinstance(json_value, list):
        for element in json_value:
            yield from _find_fields(element, names)
    elif isinstance(json_value, dict):
        for name, content in json_value.items():
            if name in names:
                yield from content if isinstance(content, list) else [content]
            else:
                yield from _find_fields(content, names)


async def _check_volumes(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    references = _find_fields(get_pod_templates(manifests.job), ["persistentVolumeClaim"])
    for name in sorted({reference["claimName"] for reference in references}):
        path = make_core_path(cluster.namespace, "persistentvolumeclaims", name)
        claim = await cluster.find_object(path)
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
    nodes = (await cluster.api.read(make_resource_path("v1", "", "nodes"))).get("items") or []
    demands = compute_pod_demands(manifests.job)
    problems = list(find_node_problems(demands, nodes))
    for problem in problems:
        yield (
            f"{problem}; correct the resources or node selectors of the release's values, or "
            "submit with --ignore nodes if nodes are added on demand"
        )
    if not problems:
        for message in find_device_shortages(sum_demands(demands), nodes):
            yield message


async def _check_quotas(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    if QUEUE_LABEL in manifests.job["metadata"]["labels"]:
        return  # the run waits in its queue until the quota permits it
    totals = sum_demands(compute_pod_demands(manifests.job))
    path = make_core_path(cluster.namespace, "resourcequotas")
    for quota in (await cluster.api.read(path)).get("items") or []:
        if not quota["spec"].get("scopes") and not quota["spec"].get("scopeSelector"):
            for message in find_quota_shortages(totals, quota):
                yield message


async def _check_admission(cluster: RunsCluster, manifests: RunManifests) -> AsyncIterator[str]:
    """Create the objects in a dry run, in which the API server checks schema and policies."""
    refusal = await _find_refusal(cluster, make_job_path(cluster.namespace), manifests.job)
    if "unknown field" in refusal:
        yield Note(f"this version of KubeRay ignores unknown fields: {refusal}")
    elif refusal:
        yield f"the API server refuses the RayJob: {refusal}"
    if manifests.network_policy is not None:
        path = make_policy_path(cluster.namespace)
        policy = manifests.network_policy
        refusal = await _find_refusal(cluster, path, policy, ignores_forbidden=False)
        if refusal:
            yield f"the API server refuses the NetworkPolicy: {refusal}"
    for template in get_pod_templates(manifests.job):
        metadata = {
            "generateName": f"{manifests.run.name}-preflight-",
            "labels": template["metadata"]["labels"],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        refusal = await _find_refusal(cluster, make_core_path(cluster.namespace, "pods"), pod)
        if refusal:
            container = get_pod_containers(template)[0]["name"]
            yield f"the API server refuses the pod of container '{container}': {refusal}"


async def _find_refusal(
    cluster: RunsCluster, path: str, body: JsonObject, *, ignores_forbidden: bool = True
) -> str:
    """Return the reason why the API server would refuse an object; '' if none is known.

    Args:
        ignores_forbidden: whether the user may lack permission, because KubeRay creates the object.
    """
    try:
        await cluster.api.create(path, body, _DRY_RUN)
    except ClusterError as error:
        is_forbidden = error.status == FORBIDDEN and "cannot create resource" in error.message
        is_ignored = is_forbidden and ignores_forbidden
        is_unsupported = error.status == 400 and "dry run" in error.message
        # CONFLICT: when a run is resumed, its old RayJob still exists.
        if is_ignored or is_unsupported or error.status in (0, NOT_FOUND, CONFLICT):
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
