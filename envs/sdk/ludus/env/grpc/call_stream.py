"""The calling half of a call stream: to a server over gRPC, to a worker over a pipe.

    step, reset, ... --append--> outgoing batch --writer task--> stream
    stream --reader task--> the call's future --> the waiting coroutine

Everything that is called before the writer gets its turn travels in one batch: all calls
of one event-loop tick, and all that gather while an earlier batch is being written, cut where
the other side would not take more at once. A call that is too large is refused before it is in
a batch: it must not end the stream under the others. A call costs a future and no task. When
the stream breaks, every call in flight fails with ConnectionLostError, and so does every later
one.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from ludus.env.encoding import unwritable
from ludus.env.limits import MAX_BATCH_BYTES, MAX_CALLS_PER_MESSAGE, MAX_MESSAGE_BYTES
from ludus.env.messages.protobuf import read_error
from ludus.env.security.tracing import fill_trace, is_traced
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import CallTimeoutError, InvalidCallError, LudusError, SessionLostError


class StreamBrokenError(LudusError):
    """The stream ended; the message says why."""


class ConnectionLostError(SessionLostError):
    """The stream ended under a call; the session may live on at the other side."""


class Duplex(Protocol):
    """A stream of batches both ways."""

    async def write(self, batch: pb.CallBatch) -> None:
        """Send a batch.

        Raises:
            StreamBrokenError: the stream has ended.
        """

    def __aiter__(self) -> AsyncIterator[pb.ReplyBatch]:
        """The batches of replies; raises StreamBrokenError."""

    def cancel(self) -> None:
        """End the stream."""


class CallStream:
    """One duplex stream: its writer, its reader, and the calls in flight.

    Args:
        duplex: what carries the batches.
        peer: the other side, for messages.
        timeout_s: for one call; its future then fails, the stream continues.
        max_call_bytes: what the other side takes; a larger call is refused.
        max_calls_per_batch: fewer than the other side takes; 0 leaves it at that.
        on_broken: told once why the stream ended.
    """

    def __init__(
        self,
        duplex: Duplex,
        peer: str,
        *,
        timeout_s: float,
        max_call_bytes: int = MAX_MESSAGE_BYTES,
        max_calls_per_batch: int = 0,
        on_broken: Callable[[str], None] | None = None,
    ) -> None:
        self.broken: str | None = None
        """Why the stream ended; None while it lives."""
        self.num_batches_sent = 0
        self._duplex = duplex
        self._peer = peer
        self._timeout_s = timeout_s
        self._max_call_bytes = max_call_bytes
        self._max_calls = min(max_calls_per_batch or sys.maxsize, MAX_CALLS_PER_MESSAGE)
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._call_ids = itertools.count(1)
        self._in_flight: dict[int, tuple[asyncio.Future[pb.Reply], float]] = {}
        """Future and deadline by call id; in order of the deadlines."""
        self._expiry: asyncio.TimerHandle | None = None
        self._full_batches: list[pb.CallBatch] = []
        self._batch = pb.CallBatch()
        self._batch_bytes = 0
        self._wake = asyncio.Event()
        self._tasks = (
            self._loop.create_task(self._write_forever()),
            self._loop.create_task(self._read_forever()),
        )

    def begin(self, fill: Callable[[pb.Call], None]) -> asyncio.Future[pb.Reply]:
        """The future of the reply to a call, which `fill` writes at once.

        Raises:
            InvalidCallError: the call cannot be written, or is larger than the other side takes;
                nothing was sent.
        """
        if self.broken is not None:
            raise ConnectionLostError(self.broken)
        call_id = next(self._call_ids)
        self._add(fill, call_id)
        future: asyncio.Future[pb.Reply] = self._loop.create_future()
        self._in_flight[call_id] = (future, self._loop.time() + self._timeout_s)
        if self._expiry is None:
            self._expiry = self._loop.call_later(self._timeout_s, self._expire)
        self._wake.set()
        return future

    def _add(self, fill: Callable[[pb.Call], None], call_id: int) -> None:
        calls = self._batch.calls
        call = calls.add()
        try:
            fill(call)
            call.call_id = call_id
            if is_traced() and not call.HasField("trace"):
                fill_trace(call)
            num_bytes = call.ByteSize()
            if num_bytes > self._max_call_bytes:
                raise InvalidCallError(
                    f"expected a call of at most {self._max_call_bytes} bytes to {self._peer}, got"
                    f" {num_bytes}; send less in one call"
                )
        except UnicodeEncodeError as error:
            del calls[-1]
            raise unwritable("a call", error) from None
        except BaseException:
            del calls[-1]
            raise
        is_full = self._batch_bytes + num_bytes > MAX_BATCH_BYTES or len(calls) > self._max_calls
        if is_full and len(calls) > 1:
            last = pb.CallBatch(calls=calls[-1:])
            del calls[-1]
            self._full_batches.append(self._batch)
            self._batch, self._batch_bytes = last, 0
        self._batch_bytes += num_bytes

    def send_close(self, session_id: str) -> asyncio.Future[pb.Reply]:
        """The future of the answer to a close, which nobody has to wait for."""

        def fill(call: pb.Call) -> None:
            call.close.session_id = session_id

        return self.unawaited(self.begin(fill))

    def unawaited(self, future: asyncio.Future[pb.Reply]) -> asyncio.Future[pb.Reply]:
        """The future, whose failure nobody has to look at."""
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def close_opened(self, reply: pb.Reply) -> None:
        """Free the sessions in a reply whose caller has given up."""
        opened = [reply.open] if reply.HasField("open") else reply.open_group.sessions
        for one in opened:
            if self.broken is None:
                self.send_close(one.session_id)

    async def close(self) -> None:
        """End the stream; the server closes its sessions."""
        self._break("the client was closed")
        self._duplex.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write_forever(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                batches = [*self._full_batches, self._batch]
                self._full_batches, self._batch, self._batch_bytes = [], pb.CallBatch(), 0
                for batch in batches:
                    self.num_batches_sent += 1
                    await self._duplex.write(batch)
        except (StreamBrokenError, asyncio.InvalidStateError):
            pass  # the reader sees the end of the stream too, and says why

    async def _read_forever(self) -> None:
        try:
            async for batch in self._duplex:
                for reply in batch.replies:
                    self._settle(reply)
            self._break(f"{self._peer} ended the connection")
        except StreamBrokenError as error:
            self._break(f"the connection to {self._peer} broke: {error}")
        except asyncio.CancelledError:
            self._break(f"the connection to {self._peer} was cancelled")
            raise

    def _settle(self, reply: pb.Reply) -> None:
        future, _ = self._in_flight.pop(reply.call_id, _NO_CALL)
        if future is None or future.done():
            self.close_opened(reply)
        elif reply.HasField("error"):
            future.set_exception(read_error(reply.error))
        else:
            future.set_result(reply)

    def _expire(self) -> None:
        self._expiry = None
        now_s = self._loop.time()
        while self._in_flight:
            call_id, (future, deadline_s) = next(iter(self._in_flight.items()))
            if deadline_s > now_s:
                self._expiry = self._loop.call_at(deadline_s, self._expire)
                return
            del self._in_flight[call_id]
            if not future.done():
                future.set_exception(
                    CallTimeoutError(
                        f"expected an answer from {self._peer} within {self._timeout_s:g} s,"
                        " got none; the session is dropped"
                    )
                )

    def _break(self, reason: str) -> None:
        if self.broken is not None:
            return
        self.broken = f"session lost: {reason}; open a new one"
        if self._expiry is not None:
            self._expiry.cancel()
        in_flight, self._in_flight = self._in_flight, {}
        for future, _ in in_flight.values():
            if not future.done():
                future.set_exception(ConnectionLostError(self.broken))
        self._tasks[0].cancel()
        if self._on_broken is not None:
            self._on_broken(self.broken)


_NO_CALL: tuple[None, float] = (None, 0.0)
