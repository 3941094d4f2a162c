"""Opens that time out in the same turn of the event loop in which they are admitted or refused."""

from __future__ import annotations

import asyncio
import time

import pytest

from ludus.env.sessions.admission_queue import AdmissionQueue


class FakeCapacity:
    """Slots with an admission queue."""

    def __init__(self) -> None:
        self.num_slots = self.num_used_slots = 0
        self.queue = AdmissionQueue(self._take, self._release, timeout_s=0.01, max_waiting=9)

    def _take(self, size: int) -> int | None:
        if self.num_used_slots + size > self.num_slots:
            return None
        self.num_used_slots += size
        return size

    def _release(self, size: int) -> None:
        self.num_used_slots -= size


async def start_waiting_open(capacity: FakeCapacity) -> asyncio.Task[int | None]:
    """Start an open that waits and times out before the next turn of the event loop."""
    open_task = asyncio.create_task(capacity.queue.take())
    while not capacity.queue:
        await asyncio.sleep(0)
    time.sleep(0.05)
    return open_task


async def test_open_admitted_at_the_timeout_keeps_the_slot() -> None:
    capacity = FakeCapacity()
    open_task = await start_waiting_open(capacity)
    capacity.num_slots = 1
    asyncio.get_running_loop().call_soon(capacity.queue.advance)
    assert await open_task
    assert capacity.num_used_slots == 1


async def test_refusal_at_the_timeout_is_reported() -> None:
    capacity = FakeCapacity()
    open_task = await start_waiting_open(capacity)
    asyncio.get_running_loop().call_soon(
        capacity.queue.refuse_all, RuntimeError("server is draining")
    )
    with pytest.raises(RuntimeError, match="server is draining"):
        await open_task


async def test_timed_out_open_leaves_the_queue_and_uses_no_slot() -> None:
    capacity = FakeCapacity()
    assert not await (await start_waiting_open(capacity))
    assert (len(capacity.queue), capacity.num_used_slots) == (0, 0)
