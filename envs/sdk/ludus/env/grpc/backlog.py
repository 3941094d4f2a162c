"""Limits on the pending calls and replies of one stream.

    batches --> pending calls --> replies --ReplyWriter--> stream
       ^                                        |
       +-------- continues below the limits ----+

The server stops reading from a client that sends calls faster than they can be answered, or that
does not read its replies. Other clients are not affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import TypeAlias

from ludus.env.limits import MAX_BATCH_BYTES, MAX_BYTES_AHEAD, MAX_CALLS_AHEAD
from ludus.proto.env.v1 import env_pb2 as pb

Write: TypeAlias = Callable[[pb.ReplyBatch], Awaitable[None]]


class Backlog:
    """A counter of pending items and their bytes, with a limit on both."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def add(self, num_bytes: int) -> None:
        """Count a new item."""
        self._num_calls += 1
        self._num_bytes += num_bytes
        if self._num_calls >= MAX_CALLS_AHEAD or self._num_bytes >= MAX_BYTES_AHEAD:
            self._has_room.clear()

    def remove(self, num_bytes: int) -> None:
        """Remove an item from the count."""
        self._num_calls -= 1
        self._num_bytes -= num_bytes
        if self._num_calls < MAX_CALLS_AHEAD and self._num_bytes < MAX_BYTES_AHEAD:
            self._has_room.set()

    async def wait_for_room(self) -> None:
        """Wait until both counts are below their limits."""
        await self._has_room.wait()


class ReplyWriter:
    """A writer that sends pending replies in batches. The first pending reply wakes it."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._pending: list[tuple[pb.Reply, int]] = []
        """Replies with their sizes in bytes."""
        self._backlog = Backlog()
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()

    def put(self, reply: pb.Reply) -> None:
        """Queue a reply."""
        num_bytes = reply.ByteSize()
        self._backlog.add(num_bytes)
        self._pending.append((reply, num_bytes))
        self._wake.set()

    async def wait_for_room(self) -> None:
        """Wait until the client has read most of the queued replies."""
        await self._backlog.wait_for_room()

    async def write_forever(self) -> None:
        """Write the queued replies until cancelled."""
        while True:
            await self._wake.wait()
            await self.flush()

    async def flush(self) -> None:
        """Write all queued replies."""
        async with self._writing:
            self._wake.clear()
            pending_calls, self._pending = self._pending, []
            batch, sizes = pb.ReplyBatch(), list[int]()
            for reply, num_bytes in pending_calls:
                if sizes and sum(sizes) + num_bytes > MAX_BATCH_BYTES:
                    await self._write_batch(batch, sizes)
                    batch, sizes = pb.ReplyBatch(), []
                batch.replies.append(reply)
                sizes.append(num_bytes)
            if sizes:
                await self._write_batch(batch, sizes)

    async def _write_batch(self, batch: pb.ReplyBatch, sizes: list[int]) -> None:
        await self._write(batch)
        for num_bytes in sizes:
            self._backlog.remove(num_bytes)


class ReadAhead:
    """A reader that reads calls while earlier calls run, so that their replies share a message.

    A message costs far more than a call in it. Otherwise, a client that sends one call per message
    would get one message per reply, which doubles its cost.
    """

    _ENOUGH_CALLS = 16
    """Number of calls that are answered without waiting for more calls."""
    _NUM_IDLE_TURNS = 8
    """Number of turns of the event loop, a few microseconds each, to wait for a further call."""

    def __init__(self, batches: AsyncIterable[pb.CallBatch]) -> None:
        self._batches = batches
        self._pending: list[pb.Call] = []
        self._num_bytes = 0
        self._has_ended = False
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()

    async def read(self) -> None:
        """Read until the batches end or reading raises an error."""
        try:
            async for batch in self._batches:
                self._pending.extend(batch.calls)
                self._num_bytes += batch.ByteSize()
                self._has_news.set()
                if len(self._pending) >= MAX_CALLS_AHEAD or self._num_bytes >= MAX_BYTES_AHEAD:
                    self._has_room.clear()
                    await self._has_room.wait()
        finally:
            self._has_ended = True
            self._has_news.set()

    async def take(self, *, gathers: bool) -> list[pb.Call]:
        """Wait for at least one call and return all pending calls; empty after the last batch.

        Args:
            gathers: wait a little longer if there are only a few calls and more keep arriving.
        """
        while not self._pending and not self._has_ended:
            self._has_news.clear()
            await self._has_news.wait()
        if gathers:
            await self._gather()
        calls, self._pending, self._num_bytes = self._pending, [], 0
        self._has_room.set()
        return calls

    async def _gather(self) -> None:
        num_idle_turns, num_calls = 0, len(self._pending)
        while num_calls < self._ENOUGH_CALLS and num_idle_turns < self._NUM_IDLE_TURNS:
            await asyncio.sleep(0)
            num_idle_turns = num_idle_turns + 1 if len(self._pending) == num_calls else 0
            num_calls = len(self._pending)
