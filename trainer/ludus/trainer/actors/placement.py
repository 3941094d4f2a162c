"""The resources that each actor of a run requests from Ray, and the nodes where it may run.

                     on one machine    in a cluster
    replay buffer    nothing           the driver's node: its groups are lost only with the run
    learner ranks    their GPUs        a placement group of CPUs and GPUs, few nodes or one
    rollout workers  their GPUs        CPUs and GPUs, spread over the nodes

CPUs are the threads that an actor computes with. They are not requested on one machine, because
the processes of a small run share its cores. If a cluster offers the custom resource `learner` or
`rollout`, each rank requests one unit of the former and each worker one unit of the latter. This
reserves node groups for their purpose, and lets a node group without nodes scale up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
ANY_NUMBER = 2**31
"""A number of actors above any request."""
_ROUNDING = 1e-6
"""Tolerance for sums of fractional GPUs."""


@dataclass(frozen=True, slots=True)
class ActorRequest:
    """The actors of one kind, all of which a run needs."""

    kind: str
    num_actors: int
    resources: Resources
    """Resources of each actor."""
    on_one_node: bool = False

    def __str__(self) -> str:
        plural = "s" if self.num_actors != 1 else ""
        share = " each" if self.num_actors != 1 else ""
        return (
            f"{self.num_actors} {self.kind}{plural} with {format_resources(self.resources)}{share}"
        )

    def num_fitting(self, free: Resources) -> int:
        """Return how many of the actors fit on a node with these free resources."""
        shares = [free.get(name, 0.0) / amount for name, amount in self.resources.items()]
        return min([self.num_actors, *(int(share + _ROUNDING) for share in shares)])

    def subtract_from(self, free: Resources, num_actors: int) -> dict[str, float]:
        """Return the resources that are left after placing some of the actors."""
        return {n: free[n] - num_actors * self.resources.get(n, 0.0) for n in free}


@dataclass(frozen=True, slots=True)
class RunDemand:
    """The actors that must be placed before a run can start."""

    ranks: ActorRequest
    workers: ActorRequest
    """The first rollout.min_workers workers; others join when there is room."""

    def __str__(self) -> str:
        requests = [str(request) for request in (self.ranks, self.workers) if request.num_actors]
        if self.ranks.on_one_node and self.ranks.num_actors > 1:
            requests[0] += " on one node"
        return " and ".join(requests)

    def fits(self, nodes: Iterable[Resources]) -> bool:
        """Return whether all actors can be placed on nodes with these resources."""
        return self._num_workers_fitting(nodes) >= self.workers.num_actors

    def max_workers(self, nodes: Iterable[Resources]) -> int:
        """Return how many workers fit in addition to all ranks, whatever the demand."""
        workers = replace(self.workers, num_actors=ANY_NUMBER)
        return min(ANY_NUMBER, replace(self, workers=workers)._num_workers_fitting(nodes))

    def _num_workers_fitting(self, nodes: Iterable[Resources]) -> int:
        """Return how many workers fit in addition to all ranks; -1 if the ranks do not fit."""
        # max_workers[k]: the largest number of workers when k ranks are placed, node after node.
        max_workers = {0: 0}
        for node in nodes:
            next_max: dict[int, int] = {}
            for num_ranks_here in self._rank_counts(node):
                free = self.ranks.subtract_from(node, num_ranks_here)
                num_workers_here = self.workers.num_fitting(free)
                for num_ranks, num_workers in max_workers.items():
                    rank_sum = num_ranks + num_ranks_here
                    if rank_sum <= self.ranks.num_actors:
                        worker_sum = num_workers + num_workers_here
                        next_max[rank_sum] = max(next_max.get(rank_sum, 0), worker_sum)
            max_workers = next_max
        return max_workers.get(self.ranks.num_actors, -1)

    def describe_nodes(self, nodes: Iterable[Resources]) -> str:
        """Return a text with the nodes' amounts of the requested resources."""
        names = sorted({*self.ranks.resources, *self.workers.resources})
        counts: dict[str, int] = {}
        for node in nodes:
            text = format_resources({name: node.get(name, 0.0) for name in names})
            counts[text] = counts.get(text, 0) + 1
        parts = [f"{n} node{'s' if n != 1 else ''} with {text}" for text, n in counts.items()]
        return ", ".join(parts) or "no node"

    def _rank_counts(self, node: Resources) -> Sequence[int]:
        max_ranks = self.ranks.num_fitting(node)
        if not self.ranks.on_one_node:
            return range(max_ranks + 1)
        return sorted({0, self.ranks.num_actors if max_ranks == self.ranks.num_actors else 0})


@dataclass(frozen=True, slots=True)
class Placement:
    """Ray options that place the actors of a run."""

    demand: RunDemand
    driver_node: str | None = None
    """Id of the driver's node; None on one machine."""
    group: PlacementGroup | None = None
    """Reservation with a bundle for each learner rank; None on one machine."""
    join_timeout_s: float = 0.0
    """See placement.join_timeout_s of the configuration."""
    max_workers: int = ANY_NUMBER
    """Maximum number of rollout workers that there can ever be room for."""

    @property
    def is_one_machine(self) -> bool:
        """True if there are no nodes to choose from, and none to wait for."""
        return self.driver_node is None

    def driver_node_options(self) -> dict[str, Any]:
        """Return the options of an actor on the driver's node."""
        if self.driver_node is None:
            return {"num_cpus": 0}
        strategy = NodeAffinitySchedulingStrategy(self.driver_node, soft=False)
        return {"num_cpus": 0, "scheduling_strategy": strategy}

    def rank_options(self, rank: int) -> dict[str, Any]:
        """Return the options of a learner rank."""
        options = _options(self.demand.ranks.resources)
        if self.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.group, rank)
        return options

    def worker_options(self) -> dict[str, Any]:
        """Return the options of a rollout worker."""
        options = _options(self.demand.workers.resources)
        return options if self.is_one_machine else options | {"scheduling_strategy": "SPREAD"}


def place_on_one_machine(run: LanguageModelRun, *, with_learner: bool = True) -> Placement:
    """Return a placement of all actors on this machine."""
    ranks = _resources(num_gpus=run.learner.num_gpus_per_rank)
    workers = _resources(num_gpus=run.rollout.num_gpus_per_worker)
    return Placement(_demand(run, ranks, workers, with_learner=with_learner))


def place_in_cluster(
    run: LanguageModelRun,
    nodes: Iterable[Resources],
    driver_node: str,
    *,
    with_learner: bool = True,
) -> Placement:
    """Return a placement on the nodes of a cluster, without its placement group yet."""
    learner, rollout = run.learner, run.rollout
    has_groups = any(node.keys() & {LEARNER_RESOURCE, ROLLOUT_RESOURCE} for node in nodes)
    ranks = _resources(
        num_cpus=learner.num_threads,
        num_gpus=learner.num_gpus_per_rank,
        custom=[LEARNER_RESOURCE] if has_groups else [],
    )
    workers = _resources(
        num_cpus=rollout.num_threads,
        num_gpus=rollout.num_gpus_per_worker,
        custom=[ROLLOUT_RESOURCE] if has_groups else [],
    )
    demand = _demand(run, ranks, workers, with_learner=with_learner)
    return Placement(demand, driver_node, join_timeout_s=run.placement.join_timeout_s)


def format_resources(resources: Resources) -> str:
    """Return a text such as "2 CPU, 1 GPU"."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _demand(
    run: LanguageModelRun, ranks: Resources, workers: Resources, *, with_learner: bool
) -> RunDemand:
    num_ranks = run.learner.num_ranks if with_learner else 0
    on_one_node = run.placement.learner_ranks == "strict_pack"
    return RunDemand(
        ActorRequest("learner rank", num_ranks, ranks, on_one_node),
        ActorRequest("rollout worker", run.rollout.min_workers, workers),
    )


def _resources(
    *, num_cpus: float = 0.0, num_gpus: float = 0.0, custom: Iterable[str] = ()
) -> dict[str, float]:
    resources = {"CPU": float(num_cpus), "GPU": num_gpus, **dict.fromkeys(custom, 1.0)}
    return {name: amount for name, amount in resources.items() if amount}


def _options(resources: Resources) -> dict[str, Any]:
    """Return resources as options of an actor; Ray adds a default for any that is missing."""
    custom = {name: n for name, n in resources.items() if name not in ("CPU", "GPU")}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": custom,
    }
