"""Rollout workers are given as much as they may hold, and replaced when something is wrong."""

from __future__ import annotations

import asyncio

import pytest

from tests.controller.fake_workers import FakeActor, FakeFleet, groups_of
from tests.env.polling import turns_of_the_loop

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("num_groups", [1, 4, 8, 31, 32, 100, 513])
async def test_a_worker_plays_as_many_groups_at_once_as_the_run_says(
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
                slot = await workers.slot()
                # Now and then there are fewer groups to begin than the slot has room for.
                size = 1 if number % 3 == 0 else slot.size
                playing.append(asyncio.create_task(workers.play(slot, groups_of(*range(size)))))

        beginning = asyncio.create_task(begin_all())
        await turns_of_the_loop(100 + 3 * num_groups)
        [actor] = fleet.actors
        assert actor.num_playing == actor.most_playing == num_groups
        may_end.set()
        await turns_of_the_loop(100 + 3 * num_groups)
        assert actor.most_playing == num_groups
        beginning.cancel()
        await asyncio.gather(beginning, *playing, return_exceptions=True)


async def test_a_slot_that_is_given_back_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeFleet().running(
        monkeypatch, {"rollout": {"num_groups_in_flight": 40}}
    ) as workers:
        slots = [await workers.slot() for _ in range(14)]
        assert sum(slot.size for slot in slots) == 40
        waiting = asyncio.create_task(workers.slot())
        await turns_of_the_loop()
        assert not waiting.done()
        workers.free(slots[0])
        assert (await waiting).size == slots[0].size
