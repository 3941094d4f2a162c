"""Tests of actors that die, stall, start and stop, with real Ray, engines and gloo."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from ludus.proto.errors import CanaryError, LearnerLostError, NotFoundError
from ludus.trainer.actors.learner import LearnerGroup
from ludus.trainer.actors.workers import RolloutWorkers
from ludus.trainer.data.counts import RolloutCounts
from tests.chaos.faults import LEARNER_RANK, ROLLOUT_WORKER, find_pids
from tests.chaos.fleet import Fleet, run_fleet
from tests.env.polling import run_pending_tasks, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]
TIMEOUT_S = 600.0
"""Time limit for starting or stopping a process on a busy machine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    os.environ["LUDUS_TEST_RUN"] = str(folder)
    try:
        async with run_fleet(folder, "learner.num_ranks=2") as fleet:
            yield fleet
    finally:
        del os.environ["LUDUS_TEST_RUN"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_workers(fleet: Fleet) -> AsyncIterator[RolloutWorkers]:
    workers = await RolloutWorkers.start(fleet.spec, fleet.start_buffer(), fleet.placement)
    yield workers
    await workers.close()


@pytest_asyncio.fixture(loop_scope="module")
async def workers(module_workers: RolloutWorkers) -> RolloutWorkers:
    """Return workers with one ready worker. Tests share them because each start imports torch."""
    module_workers.resize(1)
    await wait_until(
        lambda: (
            len(module_workers.roster.ready_workers) == len(find_module_pids(ROLLOUT_WORKER)) == 1
        ),
        within_s=TIMEOUT_S,
    )
    return module_workers


async def read_counts(workers: RolloutWorkers) -> RolloutCounts:
    """Return the counts of the workers' buffer."""
    state = await workers.buffer.copy_state()
    return state.counts.get("blackjack", RolloutCounts())


def find_module_pids(kind: str) -> list[int]:
    """Return the ids of this module's processes of one kind."""
    return find_pids(os.environ["LUDUS_TEST_RUN"], kind)


async def test_killed_worker_is_replaced_and_loads_the_newest_weights(
    fleet: Fleet, workers: RolloutWorkers
) -> None:
    published_weights = fleet.publish(3)
    [weights] = await workers.load_weights(published_weights, timeout_s=TIMEOUT_S)
    assert weights.canary.version == 3
    num_restarts = workers.roster.num_restarts
    slot, previous_counts = await workers.acquire_slot(), await read_counts(workers)
    groups = fleet.make_groups(*range(64))
    await workers.buffer.begin([group.index for group in groups], 3)
    [pid] = find_module_pids(ROLLOUT_WORKER)
    os.kill(pid, signal.SIGSTOP)
    play_task = asyncio.create_task(slot.play(groups))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    unplayed_groups = await play_task
    assert sorted(unplayed_group.index for unplayed_group in unplayed_groups) == list(range(64))
    assert all(unplayed_group.is_lost for unplayed_group in unplayed_groups), (
        "a group is not marked as lost"
    )
    await wait_until(lambda: len(workers.roster.ready_workers) == 1, within_s=TIMEOUT_S)
    assert workers.roster.num_restarts == num_restarts + 1
    [weights] = workers.weights_by_worker.values()
    assert (weights.canary.version, weights.canary.content_hash) == (
        3,
        published_weights.manifest.content_hash,
    )
    counts = await read_counts(workers)
    assert counts.num_episodes - previous_counts.num_episodes == 64 * 4, (
        "not all episodes are counted"
    )
    assert counts.num_lost - previous_counts.num_lost == 64 * 4


@pytest.mark.long
async def test_removed_worker_finishes_groups_in_progress(
    fleet: Fleet, workers: RolloutWorkers
) -> None:
    num_restarts, previous_counts = workers.roster.num_restarts, await read_counts(workers)
    workers.resize(2)
    await wait_until(lambda: len(workers.roster.ready_workers) == 2, within_s=TIMEOUT_S)
    slots = [await workers.acquire_slot() for _ in range(2)]
    groups = [fleet.make_groups(*range(16)), fleet.make_groups(*range(16, 32))]
    await workers.buffer.begin(range(32), 0)
    play_tasks = [
        asyncio.create_task(slot.play(slot_groups))
        for slot, slot_groups in zip(slots, groups, strict=True)
    ]
    await asyncio.sleep(0)
    workers.resize(1)
    await asyncio.gather(*play_tasks)
    await wait_until(lambda: len(find_module_pids(ROLLOUT_WORKER)) == 1, within_s=TIMEOUT_S)
    assert (len(workers.roster.ready_workers), workers.roster.num_restarts) == (1, num_restarts)
    counts = await read_counts(workers)
    assert counts.num_lost == previous_counts.num_lost
    assert counts.num_groups - previous_counts.num_groups == 32


async def test_slots_are_limited_by_the_ready_workers(
    fleet: Fleet, workers: RolloutWorkers
) -> None:
    slots = [await workers.acquire_slot()]
    while sum(slot.max_groups for slot in slots) < fleet.run.rollout.num_groups_in_flight:
        slots.append(await workers.acquire_slot())
    slot_task = asyncio.create_task(workers.acquire_slot())
    await run_pending_tasks()
    assert not slot_task.done()
    slots[0].release()
    slots[0] = await slot_task
    assert slots[0].worker is slots[1].worker
    for slot in slots:
        slot.release()


async def test_evaluation_continues_when_a_worker_is_killed(workers: RolloutWorkers) -> None:
    seeds = range(2**31, 2**31 + 400)
    workers.resize(2)
    await wait_until(lambda: len(workers.roster.ready_workers) == 2, within_s=TIMEOUT_S)
    [pid, _] = find_module_pids(ROLLOUT_WORKER)
    os.kill(pid, signal.SIGSTOP)
    evaluation_task = asyncio.create_task(workers.evaluate("blackjack", seeds, 1.0))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    outcomes = await evaluation_task
    assert [outcome.seed for outcome in outcomes] == list(seeds)
    assert all(outcome.episode_return is not None for outcome in outcomes)


@pytest.mark.long
async def test_worker_with_a_failed_engine_is_replaced(
    fleet: Fleet, workers: RolloutWorkers
) -> None:
    await workers.load_weights(fleet.publish(5), timeout_s=TIMEOUT_S)
    num_restarts, slot = workers.roster.num_restarts, await workers.acquire_slot()
    await slot.worker.actor.__ray_call__.remote(break_engine)
    await workers.buffer.begin(range(500, 516), 5)
    unplayed_groups = await slot.play(fleet.make_groups(*range(500, 516)))
    assert sorted(unplayed_group.index for unplayed_group in unplayed_groups) == list(
        range(500, 516)
    )
    await wait_until(lambda: workers.roster.num_restarts == num_restarts + 1, within_s=TIMEOUT_S)
    await wait_until(lambda: len(workers.roster.ready_workers) == 1, within_s=TIMEOUT_S)
    slot = await workers.acquire_slot()
    unplayed_groups = await slot.play(fleet.make_groups(*range(500, 516)))
    assert len(unplayed_groups) < 16, "the new worker played no group"


async def test_canary_failure_on_all_workers_raises_canary_error(
    fleet: Fleet, workers: RolloutWorkers
) -> None:
    """Run after all other tests of the shared workers, which are out of rotation afterwards."""
    with pytest.raises(CanaryError, match="does not sample from the published weights"):
        await workers.load_weights(fleet.publish(6, logprob_error=0.5), timeout_s=TIMEOUT_S)
    assert (len(workers.roster.ready_workers), workers.num_breaches) == (0, 2), (
        "the worker did not fetch the weights twice"
    )


def break_engine(worker: Any) -> None:
    """Make a worker's engine run out of memory in every step."""

    def raise_memory_error() -> None:
        raise MemoryError("out of memory")

    worker.components.engine.engine.step = raise_memory_error


@pytest.mark.long
async def test_missing_model_fails_the_start_of_workers(fleet: Fleet, tmp_path: Path) -> None:
    previous_pids = set(find_module_pids(ROLLOUT_WORKER))
    spec = replace(fleet.spec, model_path=str(tmp_path / "no-model"))
    with pytest.raises(NotFoundError, match=r"no-model': the model cannot be loaded"):
        await RolloutWorkers.start(spec, fleet.start_buffer(), fleet.placement)
    await wait_until(
        lambda: set(find_module_pids(ROLLOUT_WORKER)) <= previous_pids, within_s=TIMEOUT_S
    )


@pytest.mark.long
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
async def test_lost_rank_raises_an_error_and_restart_restores_the_checkpoint(
    fleet: Fleet, tmp_path: Path, signal_number: signal.Signals
) -> None:
    learners = LearnerGroup(fleet.run, fleet.placement)
    await learners.start(fleet.model_path, fleet.spec.weights)
    first_weights = await learners.publish(0, fleet.canary)
    await learners.save(tmp_path / "learner", tmp_path / "model")
    previous_pids = find_module_pids(LEARNER_RANK)
    assert len(previous_pids) == 2
    previous_timeouts_s = [
        await rank.__ray_call__.remote(make_timeout_setter(2.0)) for rank in learners.ranks
    ]
    assert previous_timeouts_s == [fleet.run.learner.collective_timeout_s] * 2
    os.kill(previous_pids[1], signal_number)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(LearnerLostError):
            await learners.publish(1, fleet.canary)
    await learners.restart(tmp_path / "learner")
    second_weights = await learners.publish(0, fleet.canary)
    assert second_weights.manifest.content_hash == first_weights.manifest.content_hash
    await wait_until(
        lambda: not set(previous_pids) & set(find_module_pids(LEARNER_RANK)), within_s=TIMEOUT_S
    )
    learners.close()
    await wait_until(lambda: not find_module_pids(LEARNER_RANK), within_s=TIMEOUT_S)


def make_timeout_setter(timeout_s: float) -> Callable[[object], float]:
    """Return a function that sets a rank's collective timeout and returns the previous timeout.

    The timeout is set after the start, so that slow calls during the start do not time out.
    """

    def set_timeout(_: object) -> float:
        from torch.distributed import distributed_c10d

        group = distributed_c10d._get_default_group()
        previous_timeout = group._get_backend(torch.device("cpu")).options._timeout
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
        return previous_timeout.total_seconds()

    return set_timeout
