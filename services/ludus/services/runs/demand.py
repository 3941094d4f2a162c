"""Resources that a run needs when it starts: its pods, and the requests of each pod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from ludus.services.kubernetes.api import JsonObject
from ludus.services.kubernetes.quantities import format_quantity, parse_quantity
from ludus.services.runs.manifest import head_template, pod_containers, worker_groups

_AUTOSCALER = {"cpu": "500m", "memory": "512Mi"}
"""KubeRay's default resources of the autoscaler container, which it adds to the head."""


@dataclass(frozen=True, slots=True)
class PodDemand:
    """The pods of one role and the resources of each."""

    role: str
    count: int
    """Initial number of pods."""
    requests: Mapping[str, Decimal]
    limits: Mapping[str, Decimal]
    spec: JsonObject


def pod_demands(job: JsonObject) -> list[PodDemand]:
    """Return the pods that a RayJob starts with, the head first."""
    template = head_template(job)
    cluster = job["spec"].get("rayClusterSpec") or {}
    sidecars = []
    if cluster.get("enableInTreeAutoscaling"):
        resources = (cluster.get("autoscalerOptions") or {}).get("resources")
        sidecars = [{"resources": resources or {"requests": _AUTOSCALER, "limits": _AUTOSCALER}}]
    demands = [_demand("head", 1, template, sidecars)] if template else []
    for group in worker_groups(job):
        pods = int(group.get("replicas") or 0) * int(group.get("numOfHosts") or 1)
        name = str(group.get("groupName", "workers"))
        demands.append(_demand(name, pods, group.get("template") or {}, []))
    return demands


def _demand(role: str, count: int, template: JsonObject, extra: list[JsonObject]) -> PodDemand:
    containers = [*pod_containers(template), *extra]
    limits = _sum_resources(containers, "limits")
    # Kubernetes sets a missing request to the limit.
    requests = {**limits, **_sum_resources(containers, "requests")}
    return PodDemand(role, count, requests, limits, template.get("spec") or {})


def _sum_resources(containers: list[JsonObject], kind: str) -> dict[str, Decimal]:
    total: Counter[str] = Counter()
    for container in containers:
        for resource, amount in ((container.get("resources") or {}).get(kind) or {}).items():
            total[resource] += parse_quantity(amount)  # type: ignore[assignment]
    return {resource: Decimal(amount) for resource, amount in total.items()}


# Nodes.


def explain_no_node(demand: PodDemand, nodes: list[JsonObject]) -> str:
    """Return why no node could run this pod even if it were empty, or '' if a node could."""
    admitting = [node for node in nodes if _admits(demand.spec, node)]
    if not admitting:
        selector = ", ".join(f"{k}={v}" for k, v in _selector(demand.spec).items())
        with_labels = f" with {selector}" if selector else ""
        return (
            f"no node{with_labels} admits a {demand.role} pod; check its nodeSelector and "
            "tolerations"
        )
    if any(_fits(demand, node) for node in admitting):
        return ""
    for resource, amount in demand.requests.items():
        max_amount = max(_allocatable(node, resource) for node in admitting)
        if max_amount < amount:
            return (
                f"a {demand.role} pod requests {format_quantity(amount, resource)} of {resource},"
                f" but no node that admits it has more than {format_quantity(max_amount, resource)}"
            )
    return f"a {demand.role} pod fits on no node: no node has all the resources it requests"


def device_shortages(demands: list[PodDemand], nodes: list[JsonObject]) -> Iterator[str]:
    """Yield a message for each device type that the cluster has too few of."""
    devices = {r for demand in demands for r in demand.requests if "/" in r}
    for device in sorted(devices):
        requested = sum(d.requests.get(device, Decimal(0)) * d.count for d in demands)
        available = sum((_allocatable(node, device) for node in nodes), Decimal(0))
        if requested > available:
            yield (
                f"the run starts with {requested:f} {device}, but the nodes have {available:f}; "
                "lower learner.num_ranks or rollout.min_workers, or add nodes"
            )


def _fits(demand: PodDemand, node: JsonObject) -> bool:
    """Return whether the node could run such a pod if it were empty."""
    return all(_allocatable(node, name) >= amount for name, amount in demand.requests.items())


def _allocatable(node: JsonObject, resource: str) -> Decimal:
    return parse_quantity(((node.get("status") or {}).get("allocatable") or {}).get(resource, 0))


def _selector(spec: JsonObject) -> Mapping[str, str]:
    return spec.get("nodeSelector") or {}


def _admits(spec: JsonObject, node: JsonObject) -> bool:
    """Return whether the node's labels and taints allow a pod."""
    labels = node["metadata"].get("labels") or {}
    node_spec = node.get("spec") or {}
    if node_spec.get("unschedulable"):
        return False
    if any(labels.get(key) != value for key, value in _selector(spec).items()):
        return False
    tolerations = spec.get("tolerations") or []
    return all(
        any(_tolerates(toleration, taint) for toleration in tolerations)
        for taint in node_spec.get("taints") or []
        if taint.get("effect") in ("NoSchedule", "NoExecute")
    )


def _tolerates(toleration: JsonObject, taint: JsonObject) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    if toleration["key"] != taint.get("key"):
        return False
    is_any = toleration.get("operator") == "Exists"
    return is_any or toleration.get("value", "") == taint.get("value", "")


# Quotas.


def total_demand(demands: list[PodDemand]) -> dict[str, Decimal]:
    """Return the sum of all pods, by the resource names of a ResourceQuota."""
    totals: dict[str, Decimal] = {"pods": Decimal(sum(demand.count for demand in demands))}
    for demand in demands:
        for kind, amounts in (("requests", demand.requests), ("limits", demand.limits)):
            for resource, amount in amounts.items():
                names = [f"{kind}.{resource}"]
                if kind == "requests" and resource in ("cpu", "memory"):
                    names.append(resource)
                for name in names:
                    totals[name] = totals.get(name, Decimal(0)) + amount * demand.count
    return totals


def quota_shortages(totals: Mapping[str, Decimal], quota: JsonObject) -> Iterator[str]:
    """Yield a message for each resource that exceeds the quota."""
    status = quota.get("status") or {}
    name = quota["metadata"]["name"]
    for resource, hard in (status.get("hard") or {}).items():
        amount = totals.get(resource)
        if amount is None:
            continue
        limit = parse_quantity(hard)
        free = limit - parse_quantity((status.get("used") or {}).get(resource, 0))
        if amount > limit:
            yield (
                f"the run starts with {format_quantity(amount, resource)} of {resource}, but "
                f"quota '{name}' allows {format_quantity(limit, resource)}; request a larger "
                "quota, or lower learner.num_ranks, rollout.min_workers or the resources in the "
                "release's values"
            )
        elif amount > free:
            yield (
                f"the run starts with {format_quantity(amount, resource)} of {resource}, but "
                f"quota '{name}' has {format_quantity(free, resource)} left of"
                f" {format_quantity(limit, resource)}; wait for other runs to end (ludus list),"
                " or stop one (ludus stop NAME)"
            )
