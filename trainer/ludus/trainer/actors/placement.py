"""What each actor of a run asks of Ray, and on which nodes it may run: decided here, once.

                     on one machine    in a cluster
    replay buffer    nothing           the driver's node: what waits in it dies with the run only
    learner ranks    their GPUs        a placement group of CPUs and GPUs, few nodes or one
    rollout workers  their GPUs        CPUs and GPUs, spread over the nodes

CPUs are the threads that an actor computes with. On one machine they are not asked for: the
processes of a small run share its cores. Where a cluster offers the custom resource `learner` or
`rollout`, each rank asks for one of the first and each worker for one of the second: so the nodes
of a group are kept for what the group is there for, and a group that has no node yet gets some.
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
"""Amounts by the names that Ray gives them: CPU, GPU, and custom ones."""

LEARNER_RESOURCE, ROLLOUT_RESOURCE = "learner", "rollout"
ANY_NUMBER = 2**31
"""More actors than anybody asks for."""
_ROUNDING = 1e-6
"""Shares of a GPU add up to whole ones but for this."""


@dataclass(frozen=True, slots=True)
class Request:
    """Actors of one kind, all of which a run needs."""

    kind: str
    num_actors: int
    each: Resources
    """What one of them asks for."""
    on_one_node: bool = False

    def __str__(self) -> str:
        plural = "s" if self.num_actors != 1 else ""
        share = " each" if self.num_actors != 1 else ""
        return f"{self.num_actors} {self.kind}{plural} with {amounts(self.each)}{share}"

    def num_fitting(self, free: Resources) -> int:
        """How many of the actors fit into what is free on a node."""
        shares = [free.get(name, 0.0) / amount for name, amount in self.each.items()]
        return min([self.num_actors, *(int(share + _ROUNDING) for share in shares)])

    def taken_from(self, free: Resources, num_actors: int) -> dict[str, float]:
        """What is left of a node's resources beside so many of the actors."""
        return {n: free[n] - num_actors * self.each.get(n, 0.0) for n in free}


@dataclass(frozen=True, slots=True)
class Demand:
    """What must be there before a run can begin."""

    ranks: Request
    workers: Request
    """As many as rollout.min_workers; the others join when there is room."""

    def __str__(self) -> str:
        asked = [str(request) for request in (self.ranks, self.workers) if request.num_actors]
        if self.ranks.on_one_node and self.ranks.num_actors > 1:
            asked[0] += " on one node"
        return " and ".join(asked)

    def fits(self, nodes: Iterable[Resources]) -> bool:
        """Whether there is any way to place all actors on nodes with these resources."""
        return self._num_workers_fitting(nodes) >= self.workers.num_actors

    def most_workers(self, nodes: Iterable[Resources]) -> int:
        """How many workers have room beside all ranks, however many are asked for."""
        workers = replace(self.workers, num_actors=ANY_NUMBER)
        return min(ANY_NUMBER, replace(self, workers=workers)._num_workers_fitting(nodes))

    def _num_workers_fitting(self, nodes: Iterable[Resources]) -> int:
        """The most workers beside all ranks; -1 where these do not fit."""
        # best[k]: the most workers that have room when k ranks are placed, node after node.
        best = {0: 0}
        for node in nodes:
            better: dict[int, int] = {}
            for num_here in self._rank_counts(node):
                num_workers = self.workers.num_fitting(self.ranks.taken_from(node, num_here))
                for num_before, workers_before in best.items():
                    num_ranks = num_before + num_here
                    if num_ranks <= self.ranks.num_actors:
                        most = better.get(num_ranks, 0)
                        better[num_ranks] = max(most, workers_before + num_workers)
            best = better
        return best.get(self.ranks.num_actors, -1)

    def offered_by(self, nodes: Iterable[Resources]) -> str:
        """What the nodes have of what is asked for, for people."""
        names = sorted({*self.ranks.each, *self.workers.each})
        counted: dict[str, int] = {}
        for node in nodes:
            text = amounts({name: node.get(name, 0.0) for name in names})
            counted[text] = counted.get(text, 0) + 1
        parts = [f"{n} node{'s' if n != 1 else ''} with {text}" for text, n in counted.items()]
        return ", ".join(parts) or "no node"

    def _rank_counts(self, node: Resources) -> Sequence[int]:
        most = self.ranks.num_fitting(node)
        if not self.ranks.on_one_node:
            return range(most + 1)
        return sorted({0, self.ranks.num_actors if most == self.ranks.num_actors else 0})


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the actors of a run go: options for Ray."""

    demand: Demand
    driver_node: str | None = None
    """Its id; None on one machine."""
    group: PlacementGroup | None = None
    """Room for the learner's ranks, a bundle for each; None on one machine."""
    join_timeout_s: float = 0.0
    """See placement.join_timeout_s of the configuration."""
    most_workers: int = ANY_NUMBER
    """Rollout workers that there will ever be room for."""

    @property
    def is_one_machine(self) -> bool:
        """Whether there are no nodes to choose from, and none to wait for."""
        return self.driver_node is None

    def beside_driver(self) -> dict[str, Any]:
        """For an actor without which the driver cannot go on."""
        if self.driver_node is None:
            return {"num_cpus": 0}
        beside = NodeAffinitySchedulingStrategy(self.driver_node, soft=False)
        return {"num_cpus": 0, "scheduling_strategy": beside}

    def of_rank(self, rank: int) -> dict[str, Any]:
        """For a rank of the learner."""
        options = _options(self.demand.ranks.each)
        if self.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.group, rank)
        return options

    def of_worker(self) -> dict[str, Any]:
        """For a rollout worker."""
        options = _options(self.demand.workers.each)
        return options if self.is_one_machine else options | {"scheduling_strategy": "SPREAD"}


def on_one_machine(run: LanguageModelRun, *, with_learner: bool = True) -> Placement:
    """Everything on this machine, which has no nodes to choose from or to wait for."""
    ranks = _asked(num_gpus=run.learner.num_gpus_per_rank)
    workers = _asked(num_gpus=run.rollout.num_gpus_per_worker)
    return Placement(_demand(run, ranks, workers, with_learner=with_learner))


def in_cluster(
    run: LanguageModelRun,
    nodes: Iterable[Resources],
    driver_node: str,
    *,
    with_learner: bool = True,
) -> Placement:
    """The actors on the nodes of a cluster; the placement group has yet to be made."""
    learner, rollout = run.learner, run.rollout
    has_groups = any(node.keys() & {LEARNER_RESOURCE, ROLLOUT_RESOURCE} for node in nodes)
    ranks = _asked(
        num_cpus=learner.num_threads,
        num_gpus=learner.num_gpus_per_rank,
        custom=[LEARNER_RESOURCE] if has_groups else [],
    )
    workers = _asked(
        num_cpus=rollout.num_threads,
        num_gpus=rollout.num_gpus_per_worker,
        custom=[ROLLOUT_RESOURCE] if has_groups else [],
    )
    demand = _demand(run, ranks, workers, with_learner=with_learner)
    return Placement(demand, driver_node, join_timeout_s=run.placement.join_timeout_s)


def amounts(resources: Resources) -> str:
    """Resources in words."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _demand(
    run: LanguageModelRun, ranks: Resources, workers: Resources, *, with_learner: bool
) -> Demand:
    num_ranks = run.learner.num_ranks if with_learner else 0
    on_one_node = run.placement.learner_ranks == "strict_pack"
    return Demand(
        Request("learner rank", num_ranks, ranks, on_one_node),
        Request("rollout worker", run.rollout.min_workers, workers),
    )


def _asked(
    *, num_cpus: float = 0.0, num_gpus: float = 0.0, custom: Iterable[str] = ()
) -> dict[str, float]:
    asked = {"CPU": float(num_cpus), "GPU": num_gpus, **dict.fromkeys(custom, 1.0)}
    return {name: amount for name, amount in asked.items() if amount}


def _options(resources: Resources) -> dict[str, Any]:
    """The resources as options of an actor; what is not named there, Ray would add."""
    custom = {name: n for name, n in resources.items() if name not in ("CPU", "GPU")}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": custom,
    }
