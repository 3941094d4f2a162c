"""The resources that a run needs to start, compared with nodes and quotas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from ludus.services.kubernetes.api import JsonObject
from ludus.services.kubernetes.quantities import format_quantity, parse_quantity
from ludus.services.runs.manifest import (
    get_head_template,
    get_pod_containers,
    get_ray_cluster_spec,
    get_worker_groups,
)

ZERO = Decimal(0)


@dataclass(frozen=True, slots=True)
class PodDemand:
    """The pods of one role, and the resources of each pod."""

    role: str
    num_pods: int
    """Initial number of pods."""
    spec: JsonObject
    requests: Mapping[str, Decimal]
    limits: Mapping[str, Decimal]


def compute_pod_demands(job: JsonObject) -> list[PodDemand]:
    """Return the pods that a RayJob starts with, the head first."""
    cluster = get_ray_cluster_spec(job)
    # KubeRay adds the autoscaler as a second container to the head.
    sidecars = [cluster["autoscalerOptions"]] if cluster.get("enableInTreeAutoscaling") else []
    return [
        _compute_demand("head", 1, get_head_template(job), sidecars),
        *(
            _compute_demand(group["groupName"], group["replicas"], group["template"], [])
            for group in get_worker_groups(job)
        ),
    ]


def _compute_demand(
    role: str, num_pods: int, template: JsonObject, sidecars: list[JsonObject]
) -> PodDemand:
    containers = [*get_pod_containers(template), *sidecars]
    limits = _sum_resources(containers, "limits")
    # Kubernetes sets a missing request to the limit.
    requests = {**limits, **_sum_resources(containers, "requests")}
    return PodDemand(role, num_pods, template["spec"], requests, limits)


def _sum_resources(containers: list[JsonObject], field: str) -> dict[str, Decimal]:
    totals: dict[str, Decimal] = {}
    for container in containers:
        for resource, amount in ((container.get("resources") or {}).get(field) or {}).items():
            totals[resource] = totals.get(resource, ZERO) + parse_quantity(amount)
    return totals


def sum_demands(demands: list[PodDemand]) -> dict[str, Decimal]:
    """Return the total amount of each resource, by its name in a ResourceQuota."""
    totals = {"pods": Decimal(sum(demand.num_pods for demand in demands))}
    for demand in demands:
        amounts = {f"requests.{name}": amount for name, amount in demand.requests.items()}
        amounts |= {f"limits.{name}": amount for name, amount in demand.limits.items()}
        for name, amount in amounts.items():
            totals[name] = totals.get(name, ZERO) + amount * demand.num_pods
    # A quota may name these two requests without the prefix.
    return totals | {name: totals.get(f"requests.{name}", ZERO) for name in ("cpu", "memory")}


def find_node_problems(demands: list[PodDemand], nodes: list[JsonObject]) -> Iterator[str]:
    """Yield a message for each role whose pods would fit on no node, even on empty nodes."""
    for demand in demands:
        admitting_nodes = [node for node in nodes if _admits_pod(node, demand.spec)]
        if demand.num_pods and not any(_fits_on_node(demand, node) for node in admitting_nodes):
            yield _explain_no_node(demand, admitting_nodes)


def _explain_no_node(demand: PodDemand, admitting_nodes: list[JsonObject]) -> str:
    if not admitting_nodes:
        selector = demand.spec.get("nodeSelector") or {}
        labels = ", ".join(f"{key}={label}" for key, label in selector.items())
        node_text = f"no node with {labels}" if labels else "no node"
        return f"{node_text} admits a {demand.role} pod; check its nodeSelector and tolerations"
    for resource, amount in demand.requests.items():
        max_amount = max(_read_allocatable(node, resource) for node in admitting_nodes)
        if max_amount < amount:
            return (
                f"a {demand.role} pod requests {format_quantity(amount, resource)} of {resource},"
                f" but no node that admits it has more than {format_quantity(max_amount, resource)}"
            )
    return f"a {demand.role} pod fits on no node: no node has all the resources it requests"


def find_device_shortages(totals: Mapping[str, Decimal], nodes: list[JsonObject]) -> Iterator[str]:
    """Yield a message for each device type, such as a GPU, that the cluster has too few of."""
    for name, amount in totals.items():
        device = name.removeprefix("requests.")
        available = sum((_read_allocatable(node, device) for node in nodes), ZERO)
        if device != name and "/" in device and amount > available:
            yield (
                f"the run starts with {amount:f} {device}, but the nodes have {available:f}; "
                "lower learner.num_ranks or rollout.min_workers, or add nodes"
            )


def find_quota_shortages(totals: Mapping[str, Decimal], quota: JsonObject) -> Iterator[str]:
    """Yield a message for each resource that exceeds the quota."""
    name, status = quota["metadata"]["name"], quota.get("status") or {}
    for resource, hard_limit in (status.get("hard") or {}).items():
        amount, limit = totals.get(resource, ZERO), parse_quantity(hard_limit)
        free_amount = limit - parse_quantity((status.get("used") or {}).get(resource, 0))
        amount_text, limit_text, free_text = (
            format_quantity(quantity, resource) for quantity in (amount, limit, free_amount)
        )
        problem = f"the run starts with {amount_text} of {resource}, but quota '{name}'"
        if amount > limit:
            yield (
                f"{problem} allows {limit_text}; request a larger quota, or lower "
                "learner.num_ranks, rollout.min_workers or the resources in the release's values"
            )
        elif amount > max(free_amount, ZERO):
            yield (
                f"{problem} has {free_text} left of {limit_text}; wait for other runs to end "
                "(ludus list), or stop one (ludus stop NAME)"
            )


def _fits_on_node(demand: PodDemand, node: JsonObject) -> bool:
    return all(_read_allocatable(node, name) >= amount for name, amount in demand.requests.items())


def _read_allocatable(node: JsonObject, resource: str) -> Decimal:
    return parse_quantity(((node.get("status") or {}).get("allocatable") or {}).get(resource, 0))


def _admits_pod(node: JsonObject, pod: JsonObject) -> bool:
    """Return whether the node's labels and taints allow a pod with this spec."""
    labels, spec = node["metadata"].get("labels") or {}, node.get("spec") or {}
    return (
        not spec.get("unschedulable")
        and (pod.get("nodeSelector") or {}).items() <= labels.items()
        and all(
            any(_tolerates(toleration, taint) for toleration in pod.get("tolerations") or [])
            for taint in spec.get("taints") or []
            if taint["effect"] in ("NoSchedule", "NoExecute")
        )
    )


def _tolerates(toleration: JsonObject, taint: JsonObject) -> bool:
    is_any_value = toleration.get("operator") == "Exists"
    return (
        toleration.get("effect") in (None, "", taint["effect"])
        and (toleration.get("key") == taint["key"] or (is_any_value and not toleration.get("key")))
        and (is_any_value or toleration.get("value", "") == taint.get("value", ""))
    )
