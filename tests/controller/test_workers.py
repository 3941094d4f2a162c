"""Rollout workers get groups up to their capacity, and are replaced after failures."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from ludus.proto.errors import CanaryError, EngineLostError, WeightSyncError, WorkerStartError
from ludus.trainer.actors import roster
from ludus.trainer.actors.workers import RolloutWorkers
from ludus.trainer.core.interfaces import PublishedWeights
from tests.controller.fake_workers import FakeActor, FakeFleet, make_groups, publish_weights
from tests.env.polling import move_loop_clock, run_pending_tasks, wait_until

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("num_groups", [1, 4, 8, 31, 32, 100, 200])
async def test_worker_plays_the_configured_number_of_groups(
    num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = asyncio.Event()

    async def in_play(_: FakeActor) -> None:
        await may_end.wait()

    def behave(actor: FakeActor) -> None:
        actor.in_play = in_play

    fleet = FakeFleet(behave)
    async with fleet.running(
        monkeypatch, {"rollout": {"num_groups_in_flight": num_groups, "num_workers": 1}}
    ) as workers:
        playing: list[asyncio.Task[list[int]]] = []

        async def begin_all() -> None:
            for number in range(10**6):
                slot = await workers.acquire_slot()
                # Sometimes there are fewer groups than the slot has room for.
                size = 1 if number % 3 == 0 else slot.max_groups
                playing.append(asyncio.create_task(slot.play(make_groups(*range(size)))))

        beginning = asyncio.create_task(begin_all())
        await run_pending_tasks(100 + 3 * num_groups)
        [actor] = fleet.actors
        assert actor.num_playing == actor.most_playing == num_groups
        may_end.set()
        await run_pending_tasks(100 + 3 * num_groups)
        assert actor.most_playing == num_groups
        beginning.cancel()
        await asyncio.gather(beginning, *playing, return_exceptions=True)


async def test_freed_slot_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeFleet().running(
        monkeypatch, {"rollout": {"num_groups_in_flight": 40}}
    ) as workers:
        slots = [await workers.acquire_slot() for _ in range(14)]
        assert sum(slot.max_groups for slot in slots) == 40
        waiting = asyncio.create_task(workers.acquire_slot())
        await run_pending_tasks()
        assert not waiting.done()
        slots[0].release()
        assert (await waiting).max_groups == slots[0].max_groups


async def test_run_that_stops_while_a_worker_waits_leaves_no_unhandled_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))

    def behave(actor: FakeActor) -> None:
        async def wait_until_killed() -> None:
            await asyncio.shield(actor.ended)

        actor.in_ping = wait_until_killed

    fleet = FakeFleet(behave)
    starting = asyncio.create_task(fleet.running(monkeypatch, TWO).__aenter__())
    await wait_until(lambda: len(fleet.actors) == 2)
    await run_pending_tasks()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await run_pending_tasks()
    gc.collect()
    assert not any(actor.is_alive for actor in fleet.actors) and not unheard


TWO = {"rollout": {"num_workers": 2, "num_groups_in_flight": 16}}
ALONE = {"rollout": {"num_workers": 1, "num_groups_in_flight": 16}}


def first_only(fleet: FakeFleet, change: Callable[[FakeActor], None]) -> None:
    """Apply a change to the first process only."""
    fleet.behave = lambda actor: change(actor) if actor.index == 0 else None


async def ready(workers: RolloutWorkers, number: int) -> None:
    """Wait until this number of workers is ready."""
    await wait_until(lambda: len(workers.roster.ready_workers) == number)


async def play_on(workers: RolloutWorkers) -> None:
    """Take slots until the run stops."""
    while True:
        (await workers.acquire_slot()).release()
        await asyncio.sleep(0)


async def test_worker_with_a_failed_engine_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = FakeFleet()
    failure = EngineLostError("the engine has failed: OutOfMemoryError: 20 GiB")

    async def fails(actor: FakeActor) -> None:
        actor.end(failure)
        raise failure

    async with fleet.running(monkeypatch, TWO) as workers:
        await ready(workers, 2)
        await workers.load_weights(publish_weights(1), 60)
        slots = [await workers.acquire_slot() for _ in range(2)]
        fleet.actors[0].in_play = fails
        played = [await slot.play(make_groups(number)) for number, slot in enumerate(slots)]
        refused = [[refusal.index for refusal in refusals] for refusals in played]
        assert sorted(refused) == [[], [0]] or sorted(refused) == [[], [1]]
        await wait_until(lambda: len(fleet.actors) == 3)
        await ready(workers, 2)
        assert workers.roster.num_restarts == 1
        assert {weights.canary.version for weights in workers.weights_by_worker.values()} == {1}


async def test_evaluation_episodes_of_a_failed_engine_move_to_other_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = FakeFleet()
    async with fleet.running(monkeypatch, TWO) as workers:
        await ready(workers, 2)
        fleet.actors[0].end(EngineLostError("the engine has failed"))
        outcomes = await workers.evaluate("coins", range(20), 1.0)
        assert [outcome.seed for outcome in outcomes] == list(range(20))


@pytest.mark.parametrize("method", ["breach", "timeout", "broken"])
async def test_worker_with_one_breach_fetches_all_weights_again(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(roster, "LOAD_GRACE_S", 0.0)
    fleet, may_load = FakeFleet(), asyncio.Event()

    async def in_load(published: PublishedWeights) -> None:
        num_loads = len(fleet.actors[0].from_scratch)
        if num_loads == 2 and method == "timeout":
            await asyncio.Event().wait()
        if num_loads == 2 and method == "broken":
            raise WeightSyncError("tensor 'w' arrived altered")
        if num_loads == 3:
            await may_load.wait()

    async with fleet.running(monkeypatch, TWO) as workers:
        await ready(workers, 2)
        await workers.load_weights(publish_weights(0), 60)
        doubtful, sound = fleet.actors
        doubtful.in_load = in_load
        if method == "breach":
            doubtful.canary_error = lambda _: 0.5 if len(doubtful.from_scratch) == 2 else 0.0
        weights = await workers.load_weights(publish_weights(1), 0.05)
        assert [worker_weights.canary.version for worker_weights in weights] == [1], (
            "the others do not wait for it"
        )
        assert list(workers.weights_by_worker) == [sound.number]
        slots = [await workers.acquire_slot() for _ in range(16)]
        assert {slot.worker.number for slot in slots} == {sound.number}, "it is out of rotation"
        may_load.set()
        await ready(workers, 2)
        assert doubtful.from_scratch == [True, False, True]
        assert {weights.canary.version for weights in workers.weights_by_worker.values()} == {1}
        assert workers.roster.num_restarts == 0
        assert len(fleet.actors) == 2
        assert workers.num_breaches == doubtful.num_abandoned == (method == "breach")


@pytest.mark.parametrize("method", ["breach", "broken"])
async def test_worker_with_two_breaches_is_replaced(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def in_load(published: PublishedWeights) -> None:
        if method == "broken":
            raise WeightSyncError("tensor 'w' arrived altered")

    def change(actor: FakeActor) -> None:
        actor.in_load = in_load
        actor.canary_error = lambda _: 0.5

    fleet = FakeFleet()
    first_only(fleet, change)
    async with fleet.running(monkeypatch, TWO) as workers:
        await ready(workers, 2)
        [weights] = await workers.load_weights(publish_weights(1), 60)
        assert weights.canary.version == 1
        await wait_until(lambda: len(fleet.actors) == 3)
        await ready(workers, 2)
        assert not fleet.actors[0].is_alive
        assert workers.roster.num_restarts == 1


async def test_worker_with_repeated_breaches_stops_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replacements fail, too, so the cause is not a single process."""
    fleet = FakeFleet()

    def behave(actor: FakeActor) -> None:
        actor.canary_error = lambda _: 0.5 if actor.number == 0 else 0.0

    fleet.behave = behave
    settings = TWO | {"weights": {"canary": {"max_breaches": 3}}}
    async with fleet.running(monkeypatch, settings) as workers:
        await ready(workers, 2)
        await workers.load_weights(publish_weights(1), 60)
        with pytest.raises(CanaryError, match=r"worker 0.*0\.5.*3 in a row.*max_breaches = 3"):
            await play_on(workers)
        assert workers.num_breaches == 3


async def test_first_breach_stops_a_run_that_allows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = FakeFleet()
    async with fleet.running(
        monkeypatch, TWO | {"weights": {"canary": {"max_breaches": 1}}}
    ) as workers:
        await ready(workers, 2)
        fleet.actors[0].canary_error = lambda _: 0.5
        with pytest.raises(CanaryError, match="max_breaches = 1"):
            await workers.load_weights(publish_weights(1), 60)
            await play_on(workers)


@pytest.mark.parametrize("settings", [ALONE, TWO])
async def test_breaches_of_all_workers_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    fleet = FakeFleet()
    num_workers = settings["rollout"]["num_workers"]
    async with fleet.running(monkeypatch, settings) as workers:
        await ready(workers, num_workers)
        for actor in fleet.actors:
            actor.canary_error = lambda _: 0.5
        with pytest.raises(CanaryError, match="does not sample from the published weights, nor"):
            await workers.load_weights(publish_weights(1), 60)
        assert all(actor.from_scratch == [True, True] for actor in fleet.actors[:num_workers])


async def test_failed_fetch_fails_its_delivery_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights are lost with their learner; the restarted learner publishes again."""
    fleet = FakeFleet()

    async def in_load(published: PublishedWeights) -> None:
        if published.manifest.version == 1:
            raise WeightSyncError("Ray's object store has lost them")

    async with fleet.running(monkeypatch, TWO) as workers:
        await ready(workers, 2)
        for actor in fleet.actors:
            actor.in_load = in_load
        with pytest.raises(WeightSyncError, match="has lost them"):
            await workers.load_weights(publish_weights(1), 60)
        assert (len(workers.roster.ready_workers), len(workers.weights_by_worker)) == (0, 0)
        await workers.load_weights(publish_weights(2), 60)
        await ready(workers, 2)
        assert {weights.canary.version for weights in workers.weights_by_worker.values()} == {2}


async def test_failed_start_of_an_extra_worker_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = FakeFleet()

    def behave(actor: FakeActor) -> None:
        if 0 < actor.index < 8:
            actor.end(EngineLostError("the engine has failed"))

    fleet.behave = behave
    async with fleet.running(monkeypatch, TWO) as workers:
        await wait_until(lambda: len(fleet.actors) == 9)
        await ready(workers, 2)
        assert (await workers.acquire_slot()).worker.actor.is_alive


async def test_failed_start_of_the_only_worker_stops_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = FakeFleet(lambda actor: actor.end(EngineLostError("out of memory")))
    async with fleet.running(monkeypatch, ALONE) as workers:
        with pytest.raises(WorkerStartError, match=r"3 times in a row.*out of memory"):
            await play_on(workers)


async def test_blocked_driver_does_not_declare_workers_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roster, "PING_INTERVAL_S", 0.0)
    may_answer, num_pings = asyncio.Event(), 0

    async def ping() -> None:
        nonlocal num_pings
        num_pings += 1
        await may_answer.wait()

    fleet = FakeFleet()
    async with fleet.running(monkeypatch, ALONE) as workers:
        fleet.actors[0].in_ping = ping
        await wait_until(lambda: num_pings == 1)
        move_loop_clock(1000.0)
        await run_pending_tasks()
        may_answer.set()
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
    async with fleet.running(monkeypatch, ALONE) as workers:
        fleet.actors[0].in_ping = asyncio.Event().wait
        await wait_until(lambda: len(fleet.actors) == 2 and len(workers.roster.ready_workers) == 1)
        assert workers.roster.num_restarts == 1
