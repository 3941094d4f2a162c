"""The Ray cluster of a run: joined or started, looked at, and waited for.

    survey --> nodes, and whether more may come --> Placement, placement group
                                             |
                                             +----> refused in one sentence, or waited for

Room that is not there may come: an autoscaler starts nodes for actors that wait, and a node that
was lost is replaced. A demand is refused when its room is not there, and either the autoscaler
says that it cannot bring it or there is none, for placement.join_timeout_s on end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import ray
from ray.core.generated.autoscaler_pb2 import AutoscalingState, GetClusterStatusReply
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.trainer.actors.placement import (
    Demand,
    Placement,
    Resources,
    amounts,
    in_cluster,
    on_one_machine,
)
from ludus.trainer.core.tasks import Tasks

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
_LOOK_TIMEOUT_S = 10.0
_SAY_EVERY_S = 60.0
_QUIET_S = 5.0
"""Room that is there is given within this time."""

_STARTED_TOO_SLOWLY = "timed out during startup"
"""What Ray says after 30 s, which nothing can change."""

ResultT = TypeVar("ResultT")


def is_local() -> bool:
    """Whether RAY_ADDRESS names no cluster, so that a run starts a Ray on this machine alone."""
    return _address() == "local"


@contextmanager
def _joined_ray() -> Iterator[bool]:
    """Whether Ray is this run's own, on this machine alone; it is left at the end.

    A process that has joined a cluster already stays in it: that is where the run goes.
    """
    if ray.is_initialized():
        yield False
        return
    start_ray()
    try:
        yield is_local()
    finally:
        ray.shutdown()


def start_ray() -> None:
    """Join the Ray cluster of RAY_ADDRESS, or start one on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        _init_ray()
    except Exception as error:  # Ray raises nothing narrower
        if not is_local() or _STARTED_TOO_SLOWLY not in str(error):
            raise
        _log.warning("Ray's own processes took too long to start (a busy machine?); once more")
        _init_ray()


def _init_ray() -> None:
    ray.init(
        address=_address(),
        include_dashboard=False if is_local() else None,
        log_to_driver=not is_local(),
        logging_level=logging.WARNING,
        configure_logging=False,
    )


@dataclass(frozen=True, slots=True)
class Survey:
    """What a cluster has, at one moment."""

    nodes: tuple[Resources, ...]
    """All that each living node has, whoever holds it."""
    autoscaling: AutoscalingState

    def may_bring(self, demand: Demand) -> bool:
        """Whether an autoscaler is there that does not say it cannot bring what is asked for."""
        if not self.autoscaling.autoscaler_state_version:
            return False
        infeasible = [
            dict(request.resources_bundle)
            for request in self.autoscaling.infeasible_resource_requests
        ]
        for gang in self.autoscaling.infeasible_gang_resource_requests:
            infeasible += [dict(request.resources_bundle) for request in gang.requests]
            for selector in gang.bundle_selectors:
                infeasible += [dict(r.resources_bundle) for r in selector.resource_requests]
        asked = (demand.ranks, demand.workers)
        return not any(r.num_actors and dict(r.each) in infeasible for r in asked)


def survey() -> Survey:
    """What the cluster has now."""
    nodes = tuple(node["Resources"] for node in ray.nodes() if node["Alive"])
    reply = GetClusterStatusReply()
    reply.ParseFromString(internal_kv_get_gcs_client().get_cluster_status())
    return Survey(nodes, reply.autoscaling_state)


def draining_nodes() -> frozenset[str]:
    """The ids of nodes that are about to go: evicted, reclaimed, or no longer needed."""
    return frozenset(internal_kv_get_gcs_client().get_draining_nodes(timeout=_LOOK_TIMEOUT_S))


@asynccontextmanager
async def place_in_ray(
    run: LanguageModelRun, *, with_learner: bool = True
) -> AsyncIterator[Placement]:
    """Where the run's actors go, in a Ray that is joined and left again.

    Raises:
        ConfigError: there is no room for the run, and none will be.
    """
    with _joined_ray() as is_own:
        placement = await _find_place(run, is_own=is_own, with_learner=with_learner)
        try:
            yield placement
        finally:
            if placement.group is not None:
                remove_placement_group(placement.group)


async def _find_place(run: LanguageModelRun, *, is_own: bool, with_learner: bool) -> Placement:
    """Where the run's actors go; the learner's ranks have their room, which waits for them.

    Raises:
        ConfigError: there is no room for the run, and none will be.
    """
    if is_own:
        placement = on_one_machine(run, with_learner=with_learner)
        nodes = [node["Resources"] for node in ray.nodes()]
        if not placement.demand.fits(nodes):
            raise ConfigError(_no_room("this machine", placement.demand, nodes))
        most = placement.demand.most_workers(nodes)
        if run.rollout.num_workers > most:
            _say(
                f"rollout.num_workers = {run.rollout.num_workers}, but this machine has room for "
                f"{most}, each with {amounts(placement.demand.workers.each)}: the run has {most}"
            )
        # No node joins this one: who waited for room would wait for ever.
        return replace(placement, most_workers=most)
    seen = await asyncio.to_thread(survey)
    driver_node = ray.get_runtime_context().get_node_id()
    placement = in_cluster(run, seen.nodes, driver_node, with_learner=with_learner)
    ranks = placement.demand.ranks
    if not with_learner:
        return placement
    group = placement_group(
        [dict(ranks.each)] * ranks.num_actors,
        strategy="STRICT_PACK" if ranks.on_one_node else "PACK",
    )
    await while_waiting(placement, _granted(group), others_may_hold_it=True)
    return replace(placement, group=group)


async def while_waiting(
    placement: Placement,
    waiting: Awaitable[ResultT],
    *,
    others_may_hold_it: bool = False,
    refuse: bool = True,
) -> ResultT:
    """What `waiting` returns; meanwhile the user is told which room it waits for.

    Raises:
        ConfigError: the room is not there and will not be, and `refuse` is set.
    """
    if placement.is_one_machine:
        return await waiting
    async with Tasks() as tasks:
        tasks.start(_watch(placement, others_may_hold_it=others_may_hold_it, refuse=refuse))
        return await waiting


async def _granted(group: PlacementGroup) -> None:
    # Short waits: a thread that waits cannot be cancelled, and would hold up the process's end.
    while not await asyncio.to_thread(group.wait, 1.0):
        pass


async def _watch(placement: Placement, *, others_may_hold_it: bool, refuse: bool) -> None:
    """Say now and then what is waited for, as long as it is."""
    demand = placement.demand
    last_hope_s = time.monotonic()
    next_word_s = last_hope_s + _QUIET_S
    while True:
        seen = await asyncio.to_thread(survey)
        now_s = time.monotonic()
        is_there, is_coming = demand.fits(seen.nodes), seen.may_bring(demand)
        if is_there or is_coming:
            last_hope_s = now_s
        elif refuse and now_s - last_hope_s >= placement.join_timeout_s:
            raise ConfigError(_no_room("the Ray cluster", demand, seen.nodes))
        if now_s >= next_word_s and (others_may_hold_it or not is_there):
            source = "the autoscaler" if is_coming else "nodes that join"
            source = "others that hold it" if is_there else source
            have = demand.offered_by(seen.nodes)
            _say(f"waiting for {source}: the run asks for {demand}; the cluster has {have}")
            next_word_s = now_s + _SAY_EVERY_S
        await asyncio.sleep(LOOK_EVERY_S)


def _no_room(where: str, demand: Demand, nodes: Iterable[Resources]) -> str:
    return (
        f"{where} has no room for this run: it asks for {demand}, and there is "
        f"{demand.offered_by(nodes)}; add what is missing, or lower learner.num_ranks, "
        "rollout.min_workers, or the num_threads and GPUs of either"
    )


def _say(message: str) -> None:
    _log.warning("%s", message)
    sys.stderr.write(f"warning: {message}\n")
    sys.stderr.flush()


def _address() -> str:
    return os.environ.get("RAY_ADDRESS", "local")
