"""The resources that each actor of a run requests from Ray, and the nodes where it may run.

                     on one machine    in a cluster
    replay buffer    nothing           the driver's node: its groups are lost only with the run
    learner ranks    their GPUs        a placement group of CPUs and GPUs, few nodes or one
    rollout workers  their GPUs        CPUs and GPUs, spread over the nodes

An actor requests one CPU per compute thread. On one machine no CPUs are requested, because the
processes of a small run share its cores. If a cluster offers the custom resource `learner` or
`rollout`, each rank requests one unit of the former and each worker one unit of the latter. This
reserves node groups for learner or rollout, and lets an empty node group scale up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto
from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ludus.proto.config import LanguageModelRun

Resources = Mapping[str, float]
"""Amounts of resources, by Ray's names: CPU, GPU, and custom resources."""

LEARNER_RESOURCE, ROLLOUT_RESOURCE = "learner", "rollout"
UNLIMITED_ACTORS = 2**31
"""Number of actors that stands for no limit."""
_GPU_TOLERANCE = 1e-6
"""Tolerance for sums of fractional GPUs."""


class Roles(Flag):
    """Kinds of actors that need room in a run; an evaluation has no learner."""

    RANKS = auto()
    WORKERS = auto()
    ALL = RANKS | WORKERS


@dataclass(frozen=True, slots=True)
class ActorRequest:
    """A number of actors of one kind that a run needs."""

    role: str
    """Role of the actors in messages, such as "learner rank"."""
    num_actors: int
    resources: Resources
    """Resources of each actor."""
    must_share_node: bool = False

    def __str__(self) -> str:
        resources = format_resources(self.resources)
        if self.num_actors == 1:
            return f"1 {self.role} with {resources}"
        return f"{self.num_actors} {self.role}s with {resources} each"

    def count_fitting_actors(self, free_resources: Resources) -> int:
        """Return the number of these actors that fit on a node with these free resources."""
        ratios = [free_resources.get(name, 0.0) / amount for name, amount in self.resources.items()]
        return min([self.num_actors, *(int(ratio + _GPU_TOLERANCE) for ratio in ratios)])


@dataclass(frozen=True, slots=True)
class RunDemand:
    """The actors that must be placed before a run can start."""

    ranks: ActorRequest
    workers: ActorRequest
    """The first rollout.min_workers workers; others join when there is room."""

    def __str__(self) -> str:
        requests = [str(request) for request in (self.ranks, self.workers) if request.num_actors]
        if self.ranks.must_share_node and self.ranks.num_actors > 1:
            requests[0] += " on one node"
        return " and ".join(requests)

    def fits(self, nodes: Iterable[Resources]) -> bool:
        """Return whether all actors can be placed on nodes with these resources."""
        return self._count_fitting_workers(nodes) >= self.workers.num_actors

    def count_max_workers(self, nodes: Iterable[Resources]) -> int:
        """Return the number of workers that fit in addition to all ranks, beyond the demand."""
        workers = replace(self.workers, num_actors=UNLIMITED_ACTORS)
        return min(UNLIMITED_ACTORS, replace(self, workers=workers)._count_fitting_workers(nodes))

    def _count_fitting_workers(self, nodes: Iterable[Resources]) -> int:
        """Return the number of workers that fit with all ranks; -1 if the ranks do not fit."""
        rank, num_ranks = self.ranks.resources, self.ranks.num_actors
        # max_workers[k]: maximum number of workers if k ranks are placed on the nodes so far.
        max_workers = {0: 0}
        for node in nodes:
            next_max: dict[int, int] = {}
            for ranks_here in self._list_rank_counts(node):
                rest = {name: node[name] - ranks_here * rank.get(name, 0.0) for name in node}
                workers_here = self.workers.count_fitting_actors(rest)
                for ranks_before, workers_before in max_workers.items():
                    total_ranks = ranks_before + ranks_here
                    total_workers = workers_before + workers_here
                    if total_ranks <= num_ranks:
                        next_max[total_ranks] = max(next_max.get(total_ranks, 0), total_workers)
            max_workers = next_max
        return max_workers.get(num_ranks, -1)

    def describe_nodes(self, nodes: Iterable[Resources]) -> str:
        """Describe the nodes by their amounts of the requested resources."""
        names = sorted({*self.ranks.resources, *self.workers.resources})
        node_counts = Counter(
            format_resources({name: node.get(name, 0.0) for name in names}) for node in nodes
        )
        descriptions = [
            f"{num_nodes} node{'s' if num_nodes != 1 else ''} with {resources}"
            for resources, num_nodes in node_counts.items()
        ]
        return ", ".join(descriptions) or "no node"

    def _list_rank_counts(self, node: Resources) -> Sequence[int]:
        max_ranks = self.ranks.count_fitting_actors(node)
        if not self.ranks.must_share_node:
            return range(max_ranks + 1)
        return [0, max_ranks] if max_ranks == self.ranks.num_actors else [0]


@dataclass(frozen=True, slots=True)
class Placement:
    """Ray options that place the actors of a run."""

    demand: RunDemand
    driver_node_id: str | None = None
    """Id of the driver's node; None on one machine."""
    group: PlacementGroup | None = None
    """Reservation with a bundle for each learner rank; None on one machine."""
    join_timeout_s: float = 0.0
    """See placement.join_timeout_s of the configuration."""
    max_workers: int = UNLIMITED_ACTORS
    """Maximum number of rollout workers that fit on all nodes together."""

    @property
    def is_one_machine(self) -> bool:
        """True if the run uses only this machine, without waiting for other nodes."""
        return self.driver_node_id is None

    def make_driver_node_options(self) -> dict[str, Any]:
        """Return the options of an actor on the driver's node."""
        if self.driver_node_id is None:
            return {"num_cpus": 0}
        strategy = NodeAffinitySchedulingStrategy(self.driver_node_id, soft=False)
        return {"num_cpus": 0, "scheduling_strategy": strategy}

    def make_rank_options(self, rank: int) -> dict[str, Any]:
        """Return the options of a learner rank."""
        options = _make_options(self.demand.ranks.resources)
        if self.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.group, rank)
        return options

    def make_worker_options(self) -> dict[str, Any]:
        """Return the options of a rollout worker."""
        options = _make_options(self.demand.workers.resources)
        return options if self.is_one_machine else options | {"scheduling_strategy": "SPREAD"}


def place_on_one_machine(run: LanguageModelRun, roles: Roles = Roles.ALL) -> Placement:
    """Return a placement of the actors with these roles on this machine."""
    ranks = {"GPU": run.learner.num_gpus_per_rank}
    workers = {"GPU": run.rollout.num_gpus_per_worker}
    return Placement(_make_demand(run, ranks, workers, roles))


def place_in_cluster(
    run: LanguageModelRun,
    nodes: Iterable[Resources],
    driver_node_id: str,
    roles: Roles = Roles.ALL,
) -> Placement:
    """Return a placement on the nodes of a cluster; the caller adds the placement group."""
    learner, rollout = run.learner, run.rollout
    ranks = {"CPU": float(learner.known_num_threads), "GPU": learner.num_gpus_per_rank}
    workers = {"CPU": float(rollout.known_num_threads), "GPU": rollout.num_gpus_per_worker}
    if any(node.keys() & {LEARNER_RESOURCE, ROLLOUT_RESOURCE} for node in nodes):
        ranks[LEARNER_RESOURCE] = workers[ROLLOUT_RESOURCE] = 1.0
    demand = _make_demand(run, ranks, workers, roles)
    return Placement(demand, driver_node_id, join_timeout_s=run.placement.join_timeout_s)


def may_share_gpu(run: LanguageModelRun) -> bool:
    """Return whether Ray may place a learner rank and a rollout worker on the same GPU."""
    shares = (run.learner.num_gpus_per_rank, run.rollout.num_gpus_per_worker)
    return all(0 < share < 1 for share in shares)


def format_resources(resources: Resources) -> str:
    """Return a text such as "2 CPU, 1 GPU"."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _make_demand(
    run: LanguageModelRun, rank: Resources, worker: Resources, roles: Roles
) -> RunDemand:
    num_ranks = run.learner.num_ranks if Roles.RANKS in roles else 0
    num_workers = run.rollout.min_workers if Roles.WORKERS in roles else 0
    must_share_node = run.placement.learner_ranks == "strict_pack"
    rank, worker = (
        {name: amount for name, amount in resources.items() if amount}
        for resources in (rank, worker)
    )
    return RunDemand(
        ActorRequest("learner rank", num_ranks, rank, must_share_node),
        ActorRequest("rollout worker", num_workers, worker),
    )


def _make_options(resources: Resources) -> dict[str, Any]:
    """Return resources as options of an actor. Zeros replace Ray's defaults."""
    custom_resources = dict(resources)
    num_cpus, num_gpus = custom_resources.pop("CPU", 0), custom_resources.pop("GPU", 0)
    return {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": custom_resources}
