"""Who waits for room, where the room and the end of the wait come in one turn of the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from ludus.env.sessions.admission_queue import AdmissionQueue


class Room:
    """Places, and how many are taken."""

    def __init__(self) -> None:
        self.num_places = self.num_taken = 0
        self.queue = AdmissionQueue(self._take, self._give_back, timeout_s=0.01, max_waiting=9)

    def _take(self, size: int) -> bool:
        has_room = self.num_taken + size <= self.num_places
        self.num_taken += size * has_room
        return has_room

    def _give_back(self, size: int) -> None:
        self.num_taken -= size


async def waiting(room: Room) -> asyncio.Task[bool]:
    """A caller in line, whose time is over before the event loop turns again."""
    caller = asyncio.create_task(room.queue.take())
    while not room.queue:
        await asyncio.sleep(0)
    time.sleep(0.05)
    return caller


async def test_who_is_admitted_as_the_wait_ends_has_a_place() -> None:
    room = Room()
    caller = await waiting(room)
    room.num_places = 1
    asyncio.get_running_loop().call_soon(room.queue.advance)
    assert await caller
    assert room.num_taken == 1


async def test_who_is_refused_as_the_wait_ends_hears_why() -> None:
    room = Room()
    caller = await waiting(room)
    asyncio.get_running_loop().call_soon(room.queue.refuse_all, RuntimeError("it drains"))
    with pytest.raises(RuntimeError, match="it drains"):
        await caller


async def test_who_waits_in_vain_has_none() -> None:
    room = Room()
    assert not await (await waiting(room))
    assert (len(room.queue), room.num_taken) == (0, 0)
