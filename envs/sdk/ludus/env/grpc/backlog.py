"""Limits on the pending calls and replies of one stream.

    batches --> pending calls --> replies --ReplyWriter--> stream
       ^                                        |
       +------- continues below the limits -----+

The server stops reading from a client that sends calls faster than they can be answered, or that
does not read its replies. Other clients are not affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import TypeAlias

from ludus.env.limits import MAX_BATCH_BYTES, MAX_BYTES_AHEAD, MAX_CALLS_AHEAD
from ludus.proto.env.v1 import env_pb2 as pb

WriteBatch: TypeAlias = Callable[[pb.ReplyBatch], Awaitable[None]]


class Backlog:
    """A counter of pending calls or replies and their bytes, with a limit on both."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def add(self, num_bytes: int) -> None:
        """Count a new call or reply."""
        self._num_calls += 1
        self._num_bytes += num_bytes
        if self._num_calls >= MAX_CALLS_AHEAD or self._num_bytes >= MAX_BYTES_AHEAD:
            self._has_room.clear()

    def remove(self, num_bytes: int) -> None:
        """Remove a call or reply from the count."""
        self._num_calls -= 1
        self._num_bytes -= num_bytes
        if self._num_calls < MAX_CALLS_AHEAD and self._num_bytes < MAX_BYTES_AHEAD:
            self._has_room.set()

    async def wait_for_room(self) -> None:
        """Wait until both counts are below their limits."""
        await self._has_room.wait()


class ReplyWriter:
    """A writer that sends queued replies in batches, as soon as there is one."""

    def __init__(self, write: WriteBatch) -> None:
        self._write = write
        self._pending_replies: list[tuple[pb.Reply, int]] = []
        """Replies with their sizes in bytes."""
        self._backlog = Backlog()
        self._has_replies = asyncio.Event()
        self._write_lock = asyncio.Lock()

    def put(self, reply: pb.Reply) -> None:
        """Queue a reply."""
        num_bytes = reply.ByteSize()
        self._backlog.add(num_bytes)
        self._pending_replies.append((reply, num_bytes))
        self._has_replies.set()

    async def wait_for_room(self) -> None:
        """Wait until the client has read most of the queued replies."""
        await self._backlog.wait_for_room()

    async def write_forever(self) -> None:
        """Write the queued replies until cancelled."""
        while True:
            await self._has_replies.wait()
            await self.flush()

    async def flush(self) -> None:
        """Write all queued replies."""
        async with self._write_lock:
            self._has_replies.clear()
            pending_replies, self._pending_replies = self._pending_replies, []
            batch, num_bytes_per_reply = pb.ReplyBatch(), list[int]()
            for reply, num_bytes in pending_replies:
                if num_bytes_per_reply and sum(num_bytes_per_reply) + num_bytes > MAX_BATCH_BYTES:
                    await self._write_batch(batch, num_bytes_per_reply)
                    batch, num_bytes_per_reply = pb.ReplyBatch(), []
                batch.replies.append(reply)
                num_bytes_per_reply.append(num_bytes)
            if num_bytes_per_reply:
                await self._write_batch(batch, num_bytes_per_reply)

    async def _write_batch(self, batch: pb.ReplyBatch, num_bytes_per_reply: list[int]) -> None:
        await self._write(batch)
        for num_bytes in num_bytes_per_reply:
            self._backlog.remove(num_bytes)


class CallReader:
    """A reader that reads calls while earlier calls run, so that their replies share a message.

    A message costs far more than a call in it. Without this reader, a client that sends one call
    per message would get one message per reply, which doubles the cost.
    """

    _NUM_SUFFICIENT_CALLS = 16
    """Number of pending calls from which `take_calls` waits for no more calls."""
    _NUM_IDLE_TURNS = 8
    """Number of turns of the event loop, a few microseconds each, to wait for another call."""

    def __init__(self, batches: AsyncIterable[pb.CallBatch]) -> None:
        self._batches = batches
        self._calls: list[pb.Call] = []
        self._num_bytes = 0
        self._is_exhausted = False
        self._has_progress = asyncio.Event()
        self._has_room = asyncio.Event()

    async def read(self) -> None:
        """Read until the batches end or reading raises an error."""
        try:
            async for batch in self._batches:
                self._calls.extend(batch.calls)
                self._num_bytes += batch.ByteSize()
                self._has_progress.set()
                if len(self._calls) >= MAX_CALLS_AHEAD or self._num_bytes >= MAX_BYTES_AHEAD:
                    self._has_room.clear()
                    await self._has_room.wait()
        finally:
            self._is_exhausted = True
            self._has_progress.set()

    async def take_calls(self, *, waits_for_more: bool) -> list[pb.Call]:
        """Wait for at least one call and return all pending calls; empty after the last batch.

        Args:
            waits_for_more: wait a little longer while there are few calls and more keep arriving.
        """
        while not self._calls and not self._is_exhausted:
            self._has_progress.clear()
            await self._has_progress.wait()
        if waits_for_more:
            await self._wait_for_more()
        calls, self._calls, self._num_bytes = self._calls, [], 0
        self._has_room.set()
        return calls

    async def _wait_for_more(self) -> None:
        num_idle_turns, num_calls = 0, len(self._calls)
        while num_calls < self._NUM_SUFFICIENT_CALLS and num_idle_turns < self._NUM_IDLE_TURNS:
            await asyncio.sleep(0)
            num_idle_turns = num_idle_turns + 1 if len(self._calls) == num_calls else 0
            num_calls = len(self._calls)
