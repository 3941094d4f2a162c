"""Rollout workers get groups up to their capacity, and are replaced after failures."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
import ray

from ludus.proto.errors import CanaryError, EngineLostError, WeightSyncError, WorkerStartError
from ludus.trainer.actors import roster
from ludus.trainer.actors.workers import RolloutWorkers
from ludus.trainer.core.interfaces import PublishedWeights
from tests.controller.fake_workers import FakeActor, FakeFleet, make_groups, publish_weights
from tests.env.polling import advance_loop_clock, run_pending_tasks, wait_until

pytestmark = pytest.mark.timeout(60)


@pytest.mark.slow
@pytest.mark.parametrize("num_groups", [1, 4, 8, 31, 32, 100, 200])
async def test_worker_plays_the_configured_number_of_groups(
    num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    release_event = asyncio.Event()

    async def on_play(_: FakeActor) -> None:
        await release_event.wait()

    def behave(actor: FakeActor) -> None:
        actor.on_play = on_play

    fleet = FakeFleet(behave)
    async with fleet.run_workers(
        monkeypatch, {"rollout": {"num_groups_in_flight": num_groups, "num_workers": 1}}
    ) as workers:
        play_tasks: list[asyncio.Task[list[int]]] = []

        async def play_all_slots() -> None:
            for number in range(10**6):
                slot = await workers.acquire_slot()
                # Every third slot plays fewer groups than it has room for.
                num_played = 1 if number % 3 == 0 else slot.max_groups
                play_tasks.append(asyncio.create_task(slot.play(make_groups(*range(num_played)))))

        start_task = asyncio.create_task(play_all_slots())
        await run_pending_tasks(100 + 3 * num_groups)
        [actor] = fleet.actors
        assert actor.num_playing == actor.max_playing == num_groups
        release_event.set()
        await run_pending_tasks(100 + 3 * num_groups)
        assert actor.max_playing == num_groups
        start_task.cancel()
        await asyncio.gather(start_task, *play_tasks, return_exceptions=True)


async def test_freed_slot_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeFleet().run_workers(
        monkeypatch, {"rollout": {"num_groups_in_flight": 40}}
    ) as workers:
        slots = [await workers.acquire_slot() for _ in range(14)]
        assert sum(slot.max_groups for slot in slots) == 40
        slot_task = asyncio.create_task(workers.acquire_slot())
        await run_pending_tasks()
        assert not slot_task.done()
        slots[0].release()
        assert (await slot_task).max_groups == slots[0].max_groups


async def test_run_that_stops_while_a_worker_waits_leaves_no_unhandled_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unhandled_errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: unhandled_errors.append(context)
    )

    def behave(actor: FakeActor) -> None:
        async def wait_until_killed() -> None:
            await asyncio.shield(actor.end_future)

        actor.on_ping = wait_until_killed

    fleet = FakeFleet(behave)
    start_task = asyncio.create_task(fleet.run_workers(monkeypatch, TWO_WORKERS).__aenter__())
    await wait_until(lambda: len(fleet.actors) == 2)
    await run_pending_tasks()
    start_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start_task
    await run_pending_tasks()
    gc.collect()
    assert not any(actor.is_alive for actor in fleet.actors) and not unhandled_errors


TWO_WORKERS = {"rollout": {"num_workers": 2, "num_groups_in_flight": 16}}
ONE_WORKER = {"rollout": {"num_workers": 1, "num_groups_in_flight": 16}}


def change_first_actor(fleet: FakeFleet, change: Callable[[FakeActor], None]) -> None:
    """Apply a change to the first process only."""
    fleet.behave = lambda actor: change(actor) if actor.index == 0 else None


async def wait_until_ready(workers: RolloutWorkers, num_ready: int) -> None:
    """Wait until `num_ready` workers are ready."""
    await wait_until(lambda: len(workers.roster.ready_workers) == num_ready)


async def use_slots_forever(workers: RolloutWorkers) -> None:
    """Acquire and release slots until `acquire_slot` raises an error."""
    while True:
        (await workers.acquire_slot()).release()
        await asyncio.sleep(0)


def make_memory_error() -> Exception:
    """Return the error of a call whose argument is the result of a process without memory."""
    cause = ray.exceptions.OutOfMemoryError("the node is low on memory")
    return ray.exceptions.RayTaskError("BufferActor.put", "", cause).as_instanceof_cause()


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(EngineLostError("the engine has failed: OutOfMemoryError"), id="engine"),
        pytest.param(make_memory_error(), id="process"),
    ],
)
async def test_worker_that_fails_while_it_plays_is_replaced(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = FakeFleet()

    async def fail(actor: FakeActor) -> None:
        actor.kill(failure)
        raise failure

    async with fleet.run_workers(monkeypatch, TWO_WORKERS) as workers:
        await wait_until_ready(workers, 2)
        await workers.load_weights(publish_weights(1), 60)
        slots = [await workers.acquire_slot() for _ in range(2)]
        fleet.actors[0].on_play = fail
        refusals_by_slot = [
            await slot.play(make_groups(number)) for number, slot in enumerate(slots)
        ]
        refused_indices = [[refusal.index for refusal in refusals] for refusals in refusals_by_slot]
        assert sorted(refused_indices) == [[], [0]] or sorted(refused_indices) == [[], [1]]
        await wait_until(lambda: len(fleet.actors) == 3)
        await wait_until_ready(workers, 2)
        assert workers.roster.num_restarts == 1
        assert {weights.canary.version for weights in workers.weights_by_worker.values()} == {1}


async def test_evaluation_episodes_of_a_failed_engine_move_to_other_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = FakeFleet()
    async with fleet.run_workers(monkeypatch, TWO_WORKERS) as workers:
        await wait_until_ready(workers, 2)
        fleet.actors[0].kill(EngineLostError("the engine has failed"))
        outcomes = await workers.evaluate("coins", range(20), 1.0)
        assert [outcome.seed for outcome in outcomes] == list(range(20))


@pytest.mark.parametrize("failure_kind", ["breach", "timeout", "broken"])
async def test_worker_with_one_breach_fetches_all_weights_again(
    monkeypatch: pytest.MonkeyPatch, failure_kind: str
) -> None:
    monkeypatch.setattr(roster, "LOAD_GRACE_S", 0.0)
    fleet, release_event = FakeFleet(), asyncio.Event()

    async def on_load(weights: PublishedWeights) -> None:
        num_loads = len(fleet.actors[0].from_scratch_loads)
        if num_loads == 2 and failure_kind == "timeout":
            await asyncio.Event().wait()
        if num_loads == 2 and failure_kind == "broken":
            raise WeightSyncError("tensor 'w' arrived altered")
        if num_loads == 3:
            await release_event.wait()

    async with fleet.run_workers(monkeypatch, TWO_WORKERS) as workers:
        await wait_until_ready(workers, 2)
        await workers.load_weights(publish_weights(0), 60)
        suspect_actor, healthy_actor = fleet.actors
        suspect_actor.on_load = on_load
        if failure_kind == "breach":
            suspect_actor.canary_error = lambda _: (
                0.5 if len(suspect_actor.from_scratch_loads) == 2 else 0.0
            )
        weights = await workers.load_weights(publish_weights(1), 0.05)
        assert [worker_weights.canary.version for worker_weights in weights] == [1], (
            "the healthy worker was delayed"
        )
        assert list(workers.weights_by_worker) == [healthy_actor.number]
        slots = [await workers.acquire_slot() for _ in range(16)]
        assert {slot.worker.number for slot in slots} == {healthy_actor.number}, (
            "the suspect worker is still in rotation"
        )
        release_event.set()
        await wait_until_ready(workers, 2)
        assert suspect_actor.from_scratch_loads == [True, False, True]
        assert {weights.canary.version for weights in workers.weights_by_worker.values()} == {1}
        assert workers.roster.num_restarts == 0
        assert len(fleet.actors) == 2
        assert workers.num_breaches == suspect_actor.num_abandon_calls == (failure_kind == "breach")


@pytest.mark.parametrize("failure_kind", ["breach", "broken"])
async def test_worker_with_two_breaches_is_replaced(
    monkeypatch: pytest.MonkeyPatch, failure_kind: str
) -> None:
    async def on_load(weights: PublishedWeights) -> None:
        if failure_kind == "broken":
            raise WeightSyncError("tensor 'w' arrived altered")

    def change(actor: FakeActor) -> None:
        actor.on_load = on_load
        actor.canary_error = lambda _: 0.5

    fleet = FakeFleet()
    change_first_actor(fleet, change)
    async with fleet.run_workers(monkeypatch, TWO_WORKERS) as workers:
        await wait_until_ready(workers, 2)
        [weights] = await workers.load_weights(publish_weights(1), 60)
        assert weights.canary.version == 1
        await wait_until(lambda: len(fleet.actors) == 3)
        await wait_until_ready(workers, 2)
        assert not fleet.actors[0].is_alive
        assert workers.roster.num_restarts == 1


async def test_worker_with_repeated_breaches_stops_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each replacement fails too, so the cause is not a single process."""
    fleet = FakeFleet()

    def behave(actor: FakeActor) -> None:
        actor.canary_error = lambda _: 0.5 if actor.number == 0 else 0.0

    fleet.behave = behave
    settings = TWO_WORKERS | {"weights": {"canary": {"max_breaches": 3}}}
    async with fleet.run_workers(monkeypatch, settings) as workers:
        await wait_until_ready(workers, 2)
        await workers.load_weights(publish_weights(1), 60)
        with pytest.raises(CanaryError, match=r"worker 0.*0\.5.*3 in a row.*max_breaches = 3"):
            await use_slots_forever(workers)
        assert workers.num_breaches == 3


async def test_first_breach_stops_the_run_if_max_breaches_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = FakeFleet()
    async with fleet.run_workers(
        monkeypatch, TWO_WORKERS | {"weights": {"canary": {"max_breaches": 1}}}
    ) as workers:
        await wait_until_ready(workers, 2)
        fleet.actors[0].canary_error = lambda _: 0.5
        with pytest.raises(CanaryError, match="max_breaches = 1"):
            await workers.load_weights(publish_weights(1), 60)
            await use_slots_forever(workers)


@pytest.mark.parametrize("settings", [ONE_WORKER, TWO_WORKERS])
async def test_breaches_of_all_workers_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    fleet = FakeFleet()
    num_workers = settings["rollout"]["num_workers"]
    async with fleet.run_workers(monkeypatch, settings) as workers:
        await wait_until_ready(workers, num_workers)
        for actor in fleet.actors:
            actor.canary_error = lambda _: 0.5
        with pytest.raises(CanaryError, match="does not sample from the published weights, nor"):
            await workers.load_weights(publish_weights(1), 60)
        assert all(actor.from_scratch_loads == [True, True] for actor in fleet.actors[:num_workers])


async def test_failed_fetch_affects_only_the_current_delivery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights are lost with their learner; the restarted learner publishes again."""
    fleet = FakeFleet()

    async def on_load(weights: PublishedWeights) -> None:
        if weights.manifest.version == 1:
            raise WeightSyncError("Ray's object store has lost the weights")

    async with fleet.run_workers(monkeypatch, TWO_WORKERS) as workers:
        await wait_until_ready(workers, 2)
        for actor in fleet.actors:
            actor.on_load = on_load
        with pytest.raises(WeightSyncError, match="has lost the weights"):
            await workers.load_weights(publish_weights(1), 60)
        assert (len(workers.roster.ready_workers), len(workers.weights_by_worker)) == (0, 0)
        await workers.load_weights(publish_weights(2), 60)
        await wait_until_ready(workers, 2)
        assert {weights.canary.version for weights in workers.weights_by_worker.values()} == {2}


async def test_failed_start_of_an_extra_worker_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = FakeFleet()

    def behave(actor: FakeActor) -> None:
        if 0 < actor.index < 8:
            actor.kill(EngineLostError("the engine has failed"))

    fleet.behave = behave
    async with fleet.run_workers(monkeypatch, TWO_WORKERS) as workers:
        await wait_until(lambda: len(fleet.actors) == 9)
        await wait_until_ready(workers, 2)
        assert (await workers.acquire_slot()).worker.actor.is_alive


async def test_failed_start_of_the_only_worker_stops_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = FakeFleet(lambda actor: actor.kill(EngineLostError("out of memory")))
    async with fleet.run_workers(monkeypatch, ONE_WORKER) as workers:
        with pytest.raises(WorkerStartError, match=r"3 times in a row.*out of memory"):
            await use_slots_forever(workers)


async def test_blocked_driver_does_not_declare_workers_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roster, "PING_INTERVAL_S", 0.0)
    release_event, num_pings = asyncio.Event(), 0

    async def count_ping() -> None:
        nonlocal num_pings
        num_pings += 1
        await release_event.wait()

    fleet = FakeFleet()
    async with fleet.run_workers(monkeypatch, ONE_WORKER) as workers:
        fleet.actors[0].on_ping = count_ping
        await wait_until(lambda: num_pings == 1)
        advance_loop_clock(1000.0)
        await run_pending_tasks()
        release_event.set()
        await wait_until(lambda: num_pings > 1)
        assert (len(workers.roster.ready_workers), workers.roster.num_restarts) == (1, 0)
        assert len(fleet.actors) == 1


async def test_unresponsive_worker_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roster, "PING_INTERVAL_S", 0.0)
    monkeypatch.setattr(roster, "PING_TIMEOUT_S", 0.02)
    monkeypatch.setattr(roster, "PING_POLL_S", 0.001)
    fleet = FakeFleet()
    async with fleet.run_workers(monkeypatch, ONE_WORKER) as workers:
        fleet.actors[0].on_ping = asyncio.Event().wait
        await wait_until(lambda: len(fleet.actors) == 2 and len(workers.roster.ready_workers) == 1)
        assert workers.roster.num_restarts == 1
