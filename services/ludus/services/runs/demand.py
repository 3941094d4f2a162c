"""What a run asks of a cluster: the pods that it begins with, and what each of them takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from ludus.services.kubernetes.api import JsonObject
from ludus.services.kubernetes.quantities import format_quantity, parse_quantity
from ludus.services.runs.manifest import head_template, pod_containers, worker_groups

_AUTOSCALER = {"cpu": "500m", "memory": "512Mi"}
"""KubeRay's default for the container that it adds to the head of an elastic cluster."""


@dataclass(frozen=True, slots=True)
class PodDemand:
    """Pods of one kind."""

    role: str
    count: int
    """With which the run begins."""
    requests: Mapping[str, Decimal]
    limits: Mapping[str, Decimal]
    spec: JsonObject


def demands_of(job: JsonObject) -> list[PodDemand]:
    """The pods that a RayJob begins with, the head first."""
    template = head_template(job)
    cluster = job["spec"].get("rayClusterSpec") or {}
    extra = []
    if cluster.get("enableInTreeAutoscaling"):
        given = (cluster.get("autoscalerOptions") or {}).get("resources")
        extra = [{"resources": given or {"requests": _AUTOSCALER, "limits": _AUTOSCALER}}]
    demands = [_demand("head", 1, template, extra)] if template else []
    for group in worker_groups(job):
        pods = int(group.get("replicas") or 0) * int(group.get("numOfHosts") or 1)
        name = str(group.get("groupName", "workers"))
        demands.append(_demand(name, pods, group.get("template") or {}, []))
    return demands


def _demand(role: str, count: int, template: JsonObject, extra: list[JsonObject]) -> PodDemand:
    containers = [*pod_containers(template), *extra]
    limits = _summed(containers, "limits")
    # What names a limit alone requests just that.
    requests = {**limits, **_summed(containers, "requests")}
    return PodDemand(role, count, requests, limits, template.get("spec") or {})


def _summed(containers: list[JsonObject], part: str) -> dict[str, Decimal]:
    total: Counter[str] = Counter()
    for container in containers:
        for resource, amount in ((container.get("resources") or {}).get(part) or {}).items():
            total[resource] += parse_quantity(amount)  # type: ignore[assignment]
    return {resource: Decimal(amount) for resource, amount in total.items()}


# Against the nodes.


def why_no_node_fits(demand: PodDemand, nodes: list[JsonObject]) -> str:
    """Why no node can hold a pod, even an empty one; empty where one can."""
    allowed = [node for node in nodes if _is_let_in(demand.spec, node)]
    if not allowed:
        selector = ", ".join(f"{k}={v}" for k, v in _selector(demand.spec).items())
        with_labels = f" with {selector}" if selector else ""
        return f"no node{with_labels} lets a {demand.role} pod in; see its nodeSelector and taints"
    if any(_fits(demand, node) for node in allowed):
        return ""
    for resource, amount in demand.requests.items():
        most = max(_allocatable(node, resource) for node in allowed)
        if most < amount:
            return (
                f"a {demand.role} pod asks for {format_quantity(amount, resource)} of {resource},"
                f" and no node that lets it in has more than {format_quantity(most, resource)}"
            )
    return f"a {demand.role} pod fits on no node: none has all that it asks for at once"


def device_shortages(demands: list[PodDemand], nodes: list[JsonObject]) -> Iterator[str]:
    """Devices of which all nodes together have fewer than the run begins with."""
    devices = {r for demand in demands for r in demand.requests if "/" in r}
    for device in sorted(devices):
        wanted = sum(d.requests.get(device, Decimal(0)) * d.count for d in demands)
        there = sum((_allocatable(node, device) for node in nodes), Decimal(0))
        if wanted > there:
            yield (
                f"the run begins with {wanted:f} {device}, and the nodes have {there:f} together; "
                "lower learner.num_ranks or rollout.min_workers, or add nodes"
            )


def _fits(demand: PodDemand, node: JsonObject) -> bool:
    """Whether the node could hold such a pod if it were empty."""
    return all(_allocatable(node, name) >= amount for name, amount in demand.requests.items())


def _allocatable(node: JsonObject, resource: str) -> Decimal:
    return parse_quantity(((node.get("status") or {}).get("allocatable") or {}).get(resource, 0))


def _selector(spec: JsonObject) -> Mapping[str, str]:
    return spec.get("nodeSelector") or {}


def _is_let_in(spec: JsonObject, node: JsonObject) -> bool:
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


# Against quotas.


def totals_of(demands: list[PodDemand]) -> dict[str, Decimal]:
    """What the run begins with, by the names that a ResourceQuota has for it."""
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
    """What a ResourceQuota leaves too little of."""
    status = quota.get("status") or {}
    name = quota["metadata"]["name"]
    for resource, hard in (status.get("hard") or {}).items():
        wanted = totals.get(resource)
        if wanted is None:
            continue
        limit = parse_quantity(hard)
        free = limit - parse_quantity((status.get("used") or {}).get(resource, 0))
        if wanted > limit:
            yield (
                f"the run begins with {format_quantity(wanted, resource)} of {resource}, and quota "
                f"'{name}' allows {format_quantity(limit, resource)}; ask for more, or lower "
                "learner.num_ranks, rollout.min_workers or the resources in the release's values"
            )
        elif wanted > free:
            yield (
                f"the run begins with {format_quantity(wanted, resource)} of {resource}, and quota "
                f"'{name}' has {format_quantity(free, resource)} left of"
                f" {format_quantity(limit, resource)}; wait until others end (ludus list),"
                " or stop one (ludus stop NAME)"
            )
