"""What a run asks for, and whether nodes have room for it: pure, no Ray is started."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.trainer.actors import cluster
from ludus.trainer.actors.buffer import RemoteBuffer
from ludus.trainer.actors.placement import (
    Demand,
    Placement,
    Request,
    Resources,
    adapt_to_release,
    on_one_machine,
)
from ludus.trainer.actors.rollout_worker import RolloutWorkerSpec
from ludus.trainer.actors.workers import RolloutWorkers

DRIVER_NODE = "ab" * 28


def config(**sections: object) -> LanguageModelRun:
    return LanguageModelRun.model_validate(sections)


def demand(
    num_ranks: int,
    rank: Resources,
    num_workers: int,
    worker: Resources,
    *,
    on_one_node: bool = False,
) -> Demand:
    return Demand(
        Request("learner rank", num_ranks, rank, on_one_node),
        Request("rollout worker", num_workers, worker),
    )


def test_on_one_machine_nothing_but_gpus_is_asked_for() -> None:
    placement = on_one_machine(config(rollout={"num_gpus_per_worker": 0.5, "num_threads": 4}))
    assert placement.beside_driver() == {"num_cpus": 0}
    assert placement.of_rank(0) == {"num_cpus": 0, "num_gpus": 0, "resources": {}}
    assert placement.of_worker() == {"num_cpus": 0, "num_gpus": 0.5, "resources": {}}


def test_in_a_cluster_each_actor_asks_for_what_it_computes_with() -> None:
    run = config(
        learner={"num_ranks": 2, "num_threads": 3, "num_gpus_per_rank": 1},
        rollout={"num_threads": 2},
    )
    placement = adapt_to_release(run, [{"CPU": 8.0, "GPU": 2.0}], DRIVER_NODE)
    assert placement.of_rank(0) == {"num_cpus": 3.0, "num_gpus": 1.0, "resources": {}}
    assert placement.of_worker() == {
        "num_cpus": 2.0,
        "num_gpus": 0,
        "resources": {},
        "scheduling_strategy": "SPREAD",
    }
    beside = placement.beside_driver()["scheduling_strategy"]
    assert isinstance(beside, NodeAffinitySchedulingStrategy)
    assert (beside.node_id, beside.soft) == (DRIVER_NODE, False)


def test_the_resources_of_groups_of_nodes_are_asked_for_where_there_are_such_groups() -> None:
    # A group that scales from nothing has no node yet.
    nodes: list[Resources] = [{"head": 1000.0}, {"CPU": 4.0, "learner": 1.0}, {"CPU": 4.0}]
    asked = adapt_to_release(config(), nodes, DRIVER_NODE).demand
    assert asked.ranks.each == {"CPU": 1.0, "learner": 1.0}
    assert asked.workers.each == {"CPU": 1.0, "rollout": 1.0}
    asked = adapt_to_release(config(), [{"CPU": 4.0}], DRIVER_NODE).demand
    assert asked.ranks.each == asked.workers.each == {"CPU": 1.0}


def test_a_run_needs_its_least_number_of_workers_and_an_evaluation_no_learner() -> None:
    run = config(rollout={"num_workers": 3, "min_workers": 2})
    for with_learner in (True, False):
        asked = adapt_to_release(run, [], DRIVER_NODE, with_learner=with_learner).demand
        assert (asked.ranks.num_actors, asked.workers.num_actors) == (int(with_learner), 2)


@pytest.mark.parametrize(
    ("asked", "nodes", "fits"),
    [
        (demand(1, {"CPU": 1}, 1, {"CPU": 1}), [{"CPU": 2}], True),
        (demand(1, {"CPU": 1}, 1, {"CPU": 1}), [{"CPU": 1}], False),
        (demand(1, {"CPU": 1}, 1, {"CPU": 1}), [], False),
        # The rank must leave the large node to the worker.
        (demand(1, {"CPU": 2}, 1, {"CPU": 4}), [{"CPU": 4}, {"CPU": 2}], True),
        (demand(2, {"CPU": 2}, 0, {}), [{"CPU": 3}, {"CPU": 1}], False),
        (demand(2, {"CPU": 2}, 0, {}), [{"CPU": 2}, {"CPU": 2}], True),
        (demand(2, {"CPU": 2}, 0, {}, on_one_node=True), [{"CPU": 2}, {"CPU": 2}], False),
        (demand(2, {"CPU": 2}, 1, {"CPU": 1}, on_one_node=True), [{"CPU": 4}, {"CPU": 1}], True),
        (demand(1, {"GPU": 0.1}, 9, {"GPU": 0.1}), [{"GPU": 1.0}], True),
        (demand(1, {"CPU": 1, "learner": 1}, 0, {}), [{"CPU": 9}], False),
        (demand(1, {}, 1, {}), [{"CPU": 1}], True),
    ],
)
def test_room_is_found_where_there_is_some(
    asked: Demand, nodes: list[Resources], fits: bool
) -> None:
    assert asked.fits(nodes) is fits


CPUS = st.integers(min_value=1, max_value=3)


@given(
    num_ranks=st.integers(0, 3),
    num_workers=st.integers(0, 3),
    rank=CPUS,
    worker=CPUS,
    nodes=st.lists(st.integers(0, 5), max_size=3),
    on_one_node=st.booleans(),
)
def test_room_is_found_exactly_where_trying_every_way_finds_it(
    num_ranks: int, num_workers: int, rank: int, worker: int, nodes: list[int], on_one_node: bool
) -> None:
    def is_way(places: tuple[int, ...]) -> bool:
        free = list(nodes)
        for actor, node in enumerate(places):
            free[node] -= rank if actor < num_ranks else worker
        is_together = not on_one_node or len(set(places[:num_ranks])) <= 1
        return is_together and all(left >= 0 for left in free)

    ways = itertools.product(range(len(nodes)), repeat=num_ranks + num_workers)
    asked = demand(num_ranks, {"CPU": rank}, num_workers, {"CPU": worker}, on_one_node=on_one_node)
    there: list[Resources] = [{"CPU": float(n)} for n in nodes]
    assert asked.fits(there) is any(is_way(way) for way in ways)
    if asked.fits(there):
        most = asked.most_workers(there)
        assert replace(asked, workers=replace(asked.workers, num_actors=most)).fits(there)
        one_more = replace(asked.workers, num_actors=most + 1)
        assert not replace(asked, workers=one_more).fits(there)


@contextmanager
def ray_of_its_own() -> Iterator[bool]:
    yield True


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, which a run has for itself."""
    monkeypatch.setattr(cluster, "_joined_ray", ray_of_its_own)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [{"Resources": {"CPU": 8.0, "GPU": 2.0}}])


async def place(run: LanguageModelRun) -> Placement:
    async with cluster.place_in_ray(run) as placement:
        return placement


@pytest.mark.usefixtures("two_gpus")
async def test_workers_that_no_machine_will_ever_hold_are_not_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rank = {"num_gpus_per_rank": 1}
    placement = await place(
        config(learner=rank, rollout={"num_workers": 3, "num_gpus_per_worker": 1})
    )
    assert placement.most_workers == 1
    told = "warning: rollout.num_workers = 3, but this machine has room for 1, each with 1 GPU"
    assert told in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"no room.*2 rollout workers with 1 GPU"):
        await place(
            config(
                learner=rank,
                rollout={"num_workers": 2, "min_workers": 2, "num_gpus_per_worker": 1},
            )
        )


@pytest.mark.usefixtures("two_gpus")
async def test_workers_without_gpus_are_as_many_as_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    placement = await place(config(rollout={"num_workers": 4}))
    assert placement.most_workers >= 4
    assert capsys.readouterr().err == ""


async def never() -> None:
    await asyncio.Event().wait()


@dataclass(slots=True)
class UnstartedWorkers(RolloutWorkers):
    """Workers without Ray, of which none becomes ready."""

    def _add(self) -> None:
        self._supervisors[next(self._numbers)] = asyncio.create_task(never())


async def test_no_more_workers_are_wanted_than_there_is_room_for() -> None:
    run = config(rollout={"num_workers": 2})
    spec = RolloutWorkerSpec(run, "model", {}, run.weights)
    placement = replace(on_one_machine(run), most_workers=3)
    workers = UnstartedWorkers(spec, cast(RemoteBuffer, None), placement)
    for wanted, gets in ((2, 2), (9, 3)):
        workers.resize(wanted)
        assert workers.num_wanted == gets
    for supervisor in workers._supervisors.values():
        supervisor.cancel()


def test_what_is_asked_and_what_is_there_are_said_in_words() -> None:
    asked = demand(2, {"CPU": 1, "learner": 1}, 1, {"CPU": 2}, on_one_node=True)
    assert str(asked) == (
        "2 learner ranks with 1 CPU, 1 learner each on one node and 1 rollout worker with 2 CPU"
    )
    nodes: list[Resources] = [{"CPU": 2.0, "memory": 1e9}, {"CPU": 2.0}, {}]
    assert asked.offered_by(nodes) == (
        "2 nodes with 2 CPU, 0 learner, 1 node with 0 CPU, 0 learner"
    )
    assert asked.offered_by([]) == "no node"
