"""Actors that die, stall, join and leave: real Ray, real engines, real gloo."""

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
from ludus.trainer.actors.learner_group import LearnerGroup
from ludus.trainer.actors.workers import RolloutWorkers
from ludus.trainer.data.counts import RolloutCounts
from tests.chaos.faults import LEARNER_RANK, ROLLOUT_WORKER, pids
from tests.chaos.fleet import Fleet, fleet
from tests.env.polling import eventually, turns_of_the_loop

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]
WITHIN_S = 600.0
"""In which a process starts or ends, on a machine that does much else; guards against hangs."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def around(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    os.environ["LUDUS_TEST_RUN"] = str(folder)
    try:
        async with fleet(folder, "learner.num_ranks=2") as made:
            yield made
    finally:
        del os.environ["LUDUS_TEST_RUN"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(around: Fleet) -> AsyncIterator[RolloutWorkers]:
    workers = await RolloutWorkers.start(around.spec, around.buffer(), around.placement)
    yield workers
    await workers.close()


@pytest_asyncio.fixture(loop_scope="module")
async def workers(started: RolloutWorkers) -> RolloutWorkers:
    """One worker that is ready, which the tests share: each costs an import of torch."""
    started.resize(1)
    await eventually(
        lambda: started.num_ready == len(running(ROLLOUT_WORKER)) == 1, within_s=WITHIN_S
    )
    return started


async def counts_of(workers: RolloutWorkers) -> RolloutCounts:
    """What their buffer has counted so far."""
    state = await workers.buffer.state()
    return state.counts.get("blackjack", RolloutCounts())


def running(kind: str) -> list[int]:
    """The processes of one kind that this module has started."""
    return pids(os.environ["LUDUS_TEST_RUN"], kind)


async def test_a_dead_worker_is_replaced_by_one_that_holds_the_newest_weights(
    around: Fleet, workers: RolloutWorkers
) -> None:
    published = around.publish(3)
    [held] = await workers.load_weights(published, timeout_s=WITHIN_S)
    assert held.version == 3
    num_restarts, num_joined = workers.num_restarts, workers.num_joined
    slot, before = await workers.acquire_slot(), await counts_of(workers)
    groups = around.groups(*range(64))
    await workers.buffer.begin([group.index for group in groups], 3)
    [pid] = running(ROLLOUT_WORKER)
    os.kill(pid, signal.SIGSTOP)
    playing = asyncio.create_task(workers.play(slot, groups))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    refused = await playing
    assert sorted(refusal.index for refusal in refused) == list(range(64))
    assert all(refusal.is_lost for refusal in refused), "all must be played again"
    await eventually(lambda: workers.num_ready == 1, within_s=WITHIN_S)
    assert (workers.num_restarts, workers.num_joined) == (num_restarts + 1, num_joined + 1)
    [held] = workers.held_weights.values()
    assert (held.version, held.content_hash) == (3, published.manifest.content_hash)
    counts = await counts_of(workers)
    assert counts.num_episodes - before.num_episodes == 64 * 4, "every episode is counted"
    assert counts.num_lost - before.num_lost == 64 * 4


async def test_a_worker_that_is_not_wanted_ends_what_it_plays_first(
    around: Fleet, workers: RolloutWorkers
) -> None:
    num_restarts, before = workers.num_restarts, await counts_of(workers)
    workers.resize(2)
    await eventually(lambda: workers.num_ready == 2, within_s=WITHIN_S)
    slots = [await workers.acquire_slot() for _ in range(2)]
    groups = [around.groups(*range(16)), around.groups(*range(16, 32))]
    await workers.buffer.begin(range(32), 0)
    playing = [
        asyncio.create_task(workers.play(slot, some))
        for slot, some in zip(slots, groups, strict=True)
    ]
    await asyncio.sleep(0)
    workers.resize(1)
    await asyncio.gather(*playing)
    await eventually(lambda: len(running(ROLLOUT_WORKER)) == 1, within_s=WITHIN_S)
    assert (workers.num_ready, workers.num_restarts) == (1, num_restarts)
    counts = await counts_of(workers)
    assert counts.num_lost == before.num_lost
    assert counts.num_groups - before.num_groups == 32


async def test_slots_are_as_many_as_ready_workers_have(
    around: Fleet, workers: RolloutWorkers
) -> None:
    slots = [await workers.acquire_slot()]
    while sum(slot.size for slot in slots) < around.run.rollout.num_groups_in_flight:
        slots.append(await workers.acquire_slot())
    waiting = asyncio.create_task(workers.acquire_slot())
    await turns_of_the_loop()
    assert not waiting.done()
    workers.release_slot(slots[0])
    slots[0] = await waiting
    assert slots[0].worker is slots[1].worker
    for slot in slots:
        workers.release_slot(slot)


async def test_an_evaluation_continues_when_a_worker_dies_over_it(workers: RolloutWorkers) -> None:
    seeds = range(2**31, 2**31 + 400)
    workers.resize(2)
    await eventually(lambda: workers.num_ready == 2, within_s=WITHIN_S)
    [pid, _] = running(ROLLOUT_WORKER)
    os.kill(pid, signal.SIGSTOP)
    judging = asyncio.create_task(workers.evaluate("blackjack", seeds, 1.0))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    outcomes = await judging
    assert [outcome.seed for outcome in outcomes] == list(seeds)
    assert all(outcome.episode_return is not None for outcome in outcomes)


async def test_a_worker_whose_engine_fails_is_replaced_and_its_groups_are_played_again(
    around: Fleet, workers: RolloutWorkers
) -> None:
    await workers.load_weights(around.publish(5), timeout_s=WITHIN_S)
    num_restarts, slot = workers.num_restarts, await workers.acquire_slot()
    await slot.worker.actor.__ray_call__.remote(failing_engine)
    await workers.buffer.begin(range(500, 516), 5)
    refused = await workers.play(slot, around.groups(*range(500, 516)))
    assert sorted(one.index for one in refused) == list(range(500, 516))
    await eventually(lambda: workers.num_restarts == num_restarts + 1, within_s=WITHIN_S)
    await eventually(lambda: workers.num_ready == 1, within_s=WITHIN_S)
    slot = await workers.acquire_slot()
    refused = await workers.play(slot, around.groups(*range(500, 516)))
    assert len(refused) < 16, "the other plays"


async def test_weights_from_which_no_worker_samples_end_the_run(
    around: Fleet, workers: RolloutWorkers
) -> None:
    """The last of those that share workers: nobody trusts these again."""
    with pytest.raises(CanaryError, match="does not sample from the published weights"):
        await workers.load_weights(around.publish(6, logprob_error=0.5), timeout_s=WITHIN_S)
    assert (workers.num_ready, workers.num_breaches) == (0, 2), "it fetched once more"


def failing_engine(worker: Any) -> None:
    """Lets the engine of a worker run out of memory in its next step."""

    def step() -> None:
        raise MemoryError("no more memory")

    worker.parts.engine.engine.step = step


async def test_a_worker_whose_model_is_not_there_ends_the_start_with_its_reason(
    around: Fleet, tmp_path: Path
) -> None:
    before = set(running(ROLLOUT_WORKER))
    spec = replace(around.spec, model_path=str(tmp_path / "no-model"))
    with pytest.raises(NotFoundError, match=r"no-model': the model cannot be loaded"):
        await RolloutWorkers.start(spec, around.buffer(), around.placement)
    await eventually(lambda: set(running(ROLLOUT_WORKER)) <= before, within_s=WITHIN_S)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_rank_ends_its_group_which_starts_again_from_the_checkpoint(
    around: Fleet, tmp_path: Path, how: signal.Signals
) -> None:
    learners = LearnerGroup(around.run, around.placement)
    await learners.start(around.learner_spec, around.spec.weights)
    first = await learners.publish(0, around.canary)
    await learners.save(tmp_path / "learner", tmp_path / "model")
    before = running(LEARNER_RANK)
    assert len(before) == 2
    waited_s = [await rank.__ray_call__.remote(waiting_only(2.0)) for rank in learners.ranks]
    assert waited_s == [around.run.learner.collective_timeout_s] * 2
    os.kill(before[1], how)
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(LearnerLostError):
            await learners.publish(1, around.canary)
    await learners.restart(tmp_path / "learner")
    again = await learners.publish(0, around.canary)
    assert again.manifest.content_hash == first.manifest.content_hash
    await eventually(lambda: not set(before) & set(running(LEARNER_RANK)), within_s=WITHIN_S)
    learners.close()
    await eventually(lambda: not running(LEARNER_RANK), within_s=WITHIN_S)


def waiting_only(seconds: float) -> Callable[[object], float]:
    """Lets a rank wait so long for others; tells how long it would have waited.

    One call alone must run out of time here, and none that is only slow.
    """

    def change(_: object) -> float:
        from torch.distributed import distributed_c10d

        group = distributed_c10d._get_default_group()
        before = group._get_backend(torch.device("cpu")).options._timeout
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
        return before.total_seconds()

    return change
