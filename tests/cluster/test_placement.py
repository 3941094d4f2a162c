"""Resource requests of a run and their placement on nodes, without starting Ray."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.trainer.actors import cluster
from ludus.trainer.actors.placement import (
    ActorRequest,
    Placement,
    Resources,
    Roles,
    RunDemand,
    place_in_cluster,
    place_on_one_machine,
)
from tests.controller.fake_workers import FakeFleet

DRIVER_NODE = "ab" * 28


def make_config(**sections: object) -> LanguageModelRun:
    return LanguageModelRun.model_validate(sections)


def make_demand(
    num_ranks: int,
    rank_resources: Resources,
    num_workers: int,
    worker_resources: Resources,
    *,
    must_share_node: bool = False,
) -> RunDemand:
    return RunDemand(
        ActorRequest("learner rank", num_ranks, rank_resources, must_share_node),
        ActorRequest("rollout worker", num_workers, worker_resources),
    )


def test_actors_on_one_machine_request_only_gpus() -> None:
    placement = place_on_one_machine(
        make_config(rollout={"num_gpus_per_worker": 0.5, "num_threads": 4})
    )
    assert placement.make_driver_node_options() == {"num_cpus": 0}
    assert placement.make_rank_options(0) == {"num_cpus": 0, "num_gpus": 0, "resources": {}}
    assert placement.make_worker_options() == {"num_cpus": 0, "num_gpus": 0.5, "resources": {}}


def test_actors_in_a_cluster_request_cpus_and_gpus() -> None:
    run = make_config(
        learner={"num_ranks": 2, "num_threads": 3, "num_gpus_per_rank": 1},
        rollout={"num_threads": 2},
    )
    placement = place_in_cluster(run, [{"CPU": 8.0, "GPU": 2.0}], DRIVER_NODE)
    assert placement.make_rank_options(0) == {"num_cpus": 3.0, "num_gpus": 1.0, "resources": {}}
    assert placement.make_worker_options() == {
        "num_cpus": 2.0,
        "num_gpus": 0,
        "resources": {},
        "scheduling_strategy": "SPREAD",
    }
    strategy = placement.make_driver_node_options()["scheduling_strategy"]
    assert isinstance(strategy, NodeAffinitySchedulingStrategy)
    assert (strategy.node_id, strategy.soft) == (DRIVER_NODE, False)


def test_actors_request_node_group_resources_if_node_groups_exist() -> None:
    # No node provides `rollout`, because the rollout node group scales from zero.
    nodes: list[Resources] = [{"head": 1000.0}, {"CPU": 4.0, "learner": 1.0}, {"CPU": 4.0}]
    run_demand = place_in_cluster(make_config(), nodes, DRIVER_NODE).demand
    assert run_demand.ranks.resources == {"CPU": 1.0, "learner": 1.0}
    assert run_demand.workers.resources == {"CPU": 1.0, "rollout": 1.0}
    run_demand = place_in_cluster(make_config(), [{"CPU": 4.0}], DRIVER_NODE).demand
    assert run_demand.ranks.resources == run_demand.workers.resources == {"CPU": 1.0}


def test_demand_includes_min_workers_and_optionally_the_learner() -> None:
    run = make_config(rollout={"num_workers": 3, "min_workers": 2})
    for roles in (Roles.ALL, Roles.WORKERS):
        run_demand = place_in_cluster(run, [], DRIVER_NODE, roles).demand
        assert (run_demand.ranks.num_actors, run_demand.workers.num_actors) == (
            int(Roles.RANKS in roles),
            2,
        )


@pytest.mark.parametrize(
    ("run_demand", "nodes", "expected_fit"),
    [
        (make_demand(1, {"CPU": 1}, 1, {"CPU": 1}), [{"CPU": 2}], True),
        (make_demand(1, {"CPU": 1}, 1, {"CPU": 1}), [{"CPU": 1}], False),
        (make_demand(1, {"CPU": 1}, 1, {"CPU": 1}), [], False),
        # Only the large node has enough CPUs for the worker, so the rank must use the small node.
        (make_demand(1, {"CPU": 2}, 1, {"CPU": 4}), [{"CPU": 4}, {"CPU": 2}], True),
        (make_demand(2, {"CPU": 2}, 0, {}), [{"CPU": 3}, {"CPU": 1}], False),
        (make_demand(2, {"CPU": 2}, 0, {}), [{"CPU": 2}, {"CPU": 2}], True),
        (make_demand(2, {"CPU": 2}, 0, {}, must_share_node=True), [{"CPU": 2}, {"CPU": 2}], False),
        (
            make_demand(2, {"CPU": 2}, 1, {"CPU": 1}, must_share_node=True),
            [{"CPU": 4}, {"CPU": 1}],
            True,
        ),
        (make_demand(1, {"GPU": 0.1}, 9, {"GPU": 0.1}), [{"GPU": 1.0}], True),
        (make_demand(1, {"CPU": 1, "learner": 1}, 0, {}), [{"CPU": 9}], False),
        (make_demand(1, {}, 1, {}), [{"CPU": 1}], True),
    ],
)
def test_demand_fits_if_nodes_have_enough_resources(
    run_demand: RunDemand, nodes: list[Resources], expected_fit: bool
) -> None:
    assert run_demand.fits(nodes) is expected_fit


CPU_COUNTS = st.integers(min_value=1, max_value=3)


@pytest.mark.slow
@given(
    num_ranks=st.integers(0, 3),
    num_workers=st.integers(0, 3),
    cpus_per_rank=CPU_COUNTS,
    cpus_per_worker=CPU_COUNTS,
    node_cpus=st.lists(st.integers(0, 5), max_size=3),
    must_share_node=st.booleans(),
)
def test_demand_fits_iff_a_valid_assignment_exists(
    num_ranks: int,
    num_workers: int,
    cpus_per_rank: int,
    cpus_per_worker: int,
    node_cpus: list[int],
    must_share_node: bool,
) -> None:
    def is_valid(assignment: tuple[int, ...]) -> bool:
        free_cpus = list(node_cpus)
        for actor, node in enumerate(assignment):
            free_cpus[node] -= cpus_per_rank if actor < num_ranks else cpus_per_worker
        shares_node = not must_share_node or len(set(assignment[:num_ranks])) <= 1
        return shares_node and all(count >= 0 for count in free_cpus)

    assignments = itertools.product(range(len(node_cpus)), repeat=num_ranks + num_workers)
    run_demand = make_demand(
        num_ranks,
        {"CPU": cpus_per_rank},
        num_workers,
        {"CPU": cpus_per_worker},
        must_share_node=must_share_node,
    )
    nodes: list[Resources] = [{"CPU": float(count)} for count in node_cpus]
    assert run_demand.fits(nodes) is any(map(is_valid, assignments))
    if run_demand.fits(nodes):
        max_workers = run_demand.count_max_workers(nodes)
        largest_request = replace(run_demand.workers, num_actors=max_workers)
        assert replace(run_demand, workers=largest_request).fits(nodes)
        too_large_request = replace(run_demand.workers, num_actors=max_workers + 1)
        assert not replace(run_demand, workers=too_large_request).fits(nodes)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with two GPUs and without a running Ray cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "start_ray", lambda: None)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [{"Resources": {"CPU": 8.0, "GPU": 2.0}}])


async def make_placement(run: LanguageModelRun) -> Placement:
    async with cluster.place_in_ray(run) as placement:
        return placement


@pytest.mark.usefixtures("two_gpus")
async def test_workers_without_free_resources_are_not_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    learner_settings = {"num_gpus_per_rank": 1}
    placement = await make_placement(
        make_config(learner=learner_settings, rollout={"num_workers": 3, "num_gpus_per_worker": 1})
    )
    assert placement.max_workers == 1
    message = "warning: rollout.num_workers = 3, but this machine has room for 1, each with 1 GPU"
    assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"no room.*2 rollout workers with 1 GPU"):
        await make_placement(
            make_config(
                learner=learner_settings,
                rollout={"num_workers": 2, "min_workers": 2, "num_gpus_per_worker": 1},
            )
        )


@pytest.mark.usefixtures("two_gpus")
async def test_workers_without_gpus_can_always_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    placement = await make_placement(make_config(rollout={"num_workers": 4}))
    assert placement.max_workers >= 4
    assert capsys.readouterr().err == ""


async def test_resize_is_limited_by_free_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"rollout": {"num_workers": 2}}
    async with FakeFleet().run_workers(monkeypatch, settings, max_workers=3) as workers:
        for requested, target in ((2, 2), (9, 3)):
            workers.resize(requested)
            assert len(workers.roster.activities) == target


def test_demand_and_nodes_have_readable_descriptions() -> None:
    run_demand = make_demand(2, {"CPU": 1, "learner": 1}, 1, {"CPU": 2}, must_share_node=True)
    assert str(run_demand) == (
        "2 learner ranks with 1 CPU, 1 learner each on one node and 1 rollout worker with 2 CPU"
    )
    nodes: list[Resources] = [{"CPU": 2.0, "memory": 1e9}, {"CPU": 2.0}, {}]
    assert run_demand.describe_nodes(nodes) == (
        "2 nodes with 2 CPU, 0 learner, 1 node with 0 CPU, 0 learner"
    )
    assert run_demand.describe_nodes([]) == "no node"
