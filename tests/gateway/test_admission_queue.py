"""Waiting opens whose capacity and timeout arrive in the same turn of the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from ludus.env.sessions.admission_queue import AdmissionQueue


class Room:
    """Capacity with a number of used places."""

    def __init__(self) -> None:
        self.num_places = self.num_taken = 0
        self.queue = AdmissionQueue(self._take, self._give_back, timeout_s=0.01, max_waiting=9)

    def _take(self, size: int) -> int | None:
        if self.num_taken + size > self.num_places:
            return None
        self.num_taken += size
        return size

    def _give_back(self, size: int) -> None:
        self.num_taken -= size


async def waiting(room: Room) -> asyncio.Task[int | None]:
    """Start a waiting caller whose timeout ends before the next turn of the event loop."""
    caller = asyncio.create_task(room.queue.take())
    while not room.queue:
        await asyncio.sleep(0)
    time.sleep(0.05)
    return caller


async def test_open_admitted_at_its_timeout_keeps_its_place() -> None:
    room = Room()
    caller = await waiting(room)
    room.num_places = 1
    asyncio.get_running_loop().call_soon(room.queue.advance)
    assert await caller
    assert room.num_taken == 1


async def test_refusal_at_the_timeout_is_reported() -> None:
    room = Room()
    caller = await waiting(room)
    asyncio.get_running_loop().call_soon(room.queue.refuse_all, RuntimeError("it drains"))
    with pytest.raises(RuntimeError, match="it drains"):
        await caller


async def test_timed_out_open_has_no_place() -> None:
    room = Room()
    assert not await (await waiting(room))
    assert (len(room.queue), room.num_taken) == (0, 0)
