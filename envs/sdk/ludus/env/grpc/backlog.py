"""What one stream has under way: calls that wait for their answer, answers that wait to be taken.

    batches --checked--> calls ahead --> answers --ReplyWriter--> stream
                 ^                                        |
                 +-------- reads on while there is room --+

A client that sends faster than it is answered, or that does not read what it is answered, is read
no further. Nothing else waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import TypeAlias

from ludus.env.limits import (
    MAX_BATCH_BYTES,
    MAX_BYTES_AHEAD,
    MAX_CALLS_AHEAD,
    MAX_CALLS_PER_MESSAGE,
)
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import InvalidCallError

Write: TypeAlias = Callable[[pb.ReplyBatch], Awaitable[None]]


async def checked(batches: AsyncIterable[pb.CallBatch]) -> AsyncIterator[pb.CallBatch]:
    """The batches.

    Raises:
        InvalidCallError: one holds more calls than a message may, which ends its stream.
    """
    async for batch in batches:
        check_number("calls in one message", len(batch.calls))
        yield batch


def check_number(what: str, number: int) -> None:
    """Refuse more calls, or steps of a call, than may travel together.

    Raises:
        InvalidCallError: it is above `MAX_CALLS_PER_MESSAGE`.
    """
    if number > MAX_CALLS_PER_MESSAGE:
        raise InvalidCallError(
            f"expected at most {MAX_CALLS_PER_MESSAGE} {what}, got {number}; send them in several"
        )


class Backlog:
    """How much is waiting, by number and bytes."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def add(self, num_bytes: int) -> None:
        """Count one more."""
        self._num_calls += 1
        self._num_bytes += num_bytes
        if self._num_calls >= MAX_CALLS_AHEAD or self._num_bytes >= MAX_BYTES_AHEAD:
            self._has_room.clear()

    def remove(self, num_bytes: int) -> None:
        """Count one less."""
        self._num_calls -= 1
        self._num_bytes -= num_bytes
        if self._num_calls < MAX_CALLS_AHEAD and self._num_bytes < MAX_BYTES_AHEAD:
            self._has_room.set()

    async def wait_for_room(self) -> None:
        """Wait until more may be added."""
        await self._has_room.wait()


class ReplyWriter:
    """Gathers replies and writes them in batches; the first waiting reply wakes the writer."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: list[tuple[pb.Reply, int]] = []
        """Replies with their sizes."""
        self._backlog = Backlog()
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()

    def put(self, reply: pb.Reply) -> None:
        """Queue a reply."""
        num_bytes = reply.ByteSize()
        self._backlog.add(num_bytes)
        self._waiting.append((reply, num_bytes))
        self._wake.set()

    async def wait_for_room(self) -> None:
        """Wait until the client has taken most of what was put."""
        await self._backlog.wait_for_room()

    async def write_forever(self) -> None:
        """Write what is put, until cancelled."""
        while True:
            await self._wake.wait()
            await self.flush()

    async def flush(self) -> None:
        """Write everything that was put."""
        async with self._writing:
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            batch, sizes = pb.ReplyBatch(), list[int]()
            for reply, num_bytes in waiting:
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
    """Reads calls while earlier ones are answered, so that their replies travel together.

    A message costs far more than a call in it. Clients that send one call per message would
    otherwise be answered one by one, and pay as much again for their replies.
    """

    _ENOUGH_CALLS = 16
    """They are answered without waiting for those after them."""
    _NUM_IDLE_TURNS = 8
    """Turns of the event loop, a few microseconds each, in which nothing more comes."""

    def __init__(self, batches: AsyncIterable[pb.CallBatch]) -> None:
        self._batches = batches
        self._waiting: list[pb.Call] = []
        self._num_bytes = 0
        self._has_ended = False
        self._came = asyncio.Event()
        self._taken = asyncio.Event()

    async def read(self) -> None:
        """Read until the batches end; raises what reading raises."""
        try:
            async for batch in checked(self._batches):
                self._waiting.extend(batch.calls)
                self._num_bytes += batch.ByteSize()
                self._came.set()
                if len(self._waiting) >= MAX_CALLS_AHEAD or self._num_bytes >= MAX_BYTES_AHEAD:
                    self._taken.clear()
                    await self._taken.wait()
        finally:
            self._has_ended = True
            self._came.set()

    async def take(self, *, gathers: bool) -> list[pb.Call]:
        """The calls that have come since, at least one; none when they have ended.

        Args:
            gathers: holds a few calls back for as long as more keep coming.
        """
        while not self._waiting and not self._has_ended:
            self._came.clear()
            await self._came.wait()
        if gathers:
            await self._gather()
        taken, self._waiting, self._num_bytes = self._waiting, [], 0
        self._taken.set()
        return taken

    async def _gather(self) -> None:
        if self._waiting and self._waiting[-1].HasField("step_many"):
            return  # who calls so has gathered already
        num_idle_turns, num_calls = 0, len(self._waiting)
        while num_calls < self._ENOUGH_CALLS and num_idle_turns < self._NUM_IDLE_TURNS:
            await asyncio.sleep(0)
            num_idle_turns = num_idle_turns + 1 if len(self._waiting) == num_calls else 0
            num_calls = len(self._waiting)
