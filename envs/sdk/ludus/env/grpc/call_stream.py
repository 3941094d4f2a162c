"""The caller's side of a call stream, to a server over gRPC or to a worker over a pipe.

    step, reset, ... --append--> outgoing batch --writer task--> stream
    stream --reader task--> the call's future --> the waiting coroutine

All calls that are made before the writer runs share one batch: the calls of one turn of the event
loop, and the calls that are made while the previous batch is written. A batch stays within the
limits of the other side. A call that is too large is refused before it enters a batch, because it
would end the stream and fail the other calls. A call needs a future, but no task. When the stream
breaks, all pending and later calls fail with ConnectionLostError.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from ludus.env.encoding import make_encode_error
from ludus.env.limits import MAX_BATCH_BYTES, MAX_CALLS_PER_MESSAGE, MAX_MESSAGE_BYTES
from ludus.env.messages.protobuf import read_error
from ludus.env.security.tracing import fill_trace, is_traced
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import CallTimeoutError, InvalidCallError, LudusError, SessionLostError


class StreamBrokenError(LudusError):
    """The stream ended. The message contains the reason."""


class ConnectionLostError(SessionLostError):
    """The stream ended during a call. The session may still exist on the other side."""


class Duplex(Protocol):
    """A stream of batches in both directions."""

    async def write(self, batch: pb.CallBatch) -> None:
        """Send a batch.

        Raises:
            StreamBrokenError: the stream has ended.
        """

    def __aiter__(self) -> AsyncIterator[pb.ReplyBatch]:
        """Yield the batches of replies; raises StreamBrokenError."""

    def cancel(self) -> None:
        """End the stream."""


class CallStream:
    """A duplex stream with its writer task, its reader task and its pending calls.

    Args:
        duplex: stream of batches.
        peer_name: name of the other side, for messages.
        timeout_s: time limit of one call. After it, the call's future fails; the stream continues.
        max_call_bytes: maximum size of one call; a larger call is refused.
        max_calls_per_batch: maximum number of calls in a batch. 0 means the other side's limit.
        on_break: called once with the reason when the stream ends.
    """

    def __init__(
        self,
        duplex: Duplex,
        peer_name: str,
        *,
        timeout_s: float,
        max_call_bytes: int = MAX_MESSAGE_BYTES,
        max_calls_per_batch: int = 0,
        on_break: Callable[[str], None] | None = None,
    ) -> None:
        self.break_reason: str | None = None
        """Error message with the reason why the stream ended; None while the stream is alive."""
        self.num_batches_sent = 0
        self._duplex = duplex
        self._peer_name = peer_name
        self._timeout_s = timeout_s
        self._max_call_bytes = max_call_bytes
        self._max_calls_per_batch = min(max_calls_per_batch or sys.maxsize, MAX_CALLS_PER_MESSAGE)
        self._on_break = on_break
        self._loop = asyncio.get_running_loop()
        self._call_ids = itertools.count(1)
        self._pending_calls: dict[int, tuple[asyncio.Future[pb.Reply], float]] = {}
        """Future and deadline by call id, ordered by deadline."""
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._full_batches: list[pb.CallBatch] = []
        self._batch = pb.CallBatch()
        self._num_batch_bytes = 0
        self._has_calls = asyncio.Event()
        create_task = self._loop.create_task
        self._tasks = (create_task(self._write_forever()), create_task(self._read_forever()))

    @property
    def has_pending_calls(self) -> bool:
        """True while a call has no reply."""
        return bool(self._pending_calls)

    def start_call(self, fill: Callable[[pb.Call], None]) -> asyncio.Future[pb.Reply]:
        """Add a call to the next batch, and return the future of its reply.

        Args:
            fill: function that writes the call. It is called immediately.

        Raises:
            InvalidCallError: the call cannot be encoded or is too large; nothing was sent.
        """
        if self.break_reason is not None:
            raise ConnectionLostError(self.break_reason)
        call_id = next(self._call_ids)
        self._add_call(fill, call_id)
        future: asyncio.Future[pb.Reply] = self._loop.create_future()
        self._pending_calls[call_id] = (future, self._loop.time() + self._timeout_s)
        if self._expiry_timer is None:
            self._expiry_timer = self._loop.call_later(self._timeout_s, self._expire_calls)
        self._has_calls.set()
        return future

    def _add_call(self, fill: Callable[[pb.Call], None], call_id: int) -> None:
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
                    f"a call to {self._peer_name} must have at most {self._max_call_bytes} bytes,"
                    f" got {num_bytes}; send less in one call"
                )
        except UnicodeEncodeError as error:
            del calls[-1]
            raise make_encode_error("a call", error) from None
        except BaseException:
            del calls[-1]
            raise
        is_full = (
            self._num_batch_bytes + num_bytes > MAX_BATCH_BYTES
            or len(calls) > self._max_calls_per_batch
        )
        if is_full and len(calls) > 1:
            last_call = pb.CallBatch(calls=calls[-1:])
            del calls[-1]
            self._full_batches.append(self._batch)
            self._batch, self._num_batch_bytes = last_call, 0
        self._num_batch_bytes += num_bytes

    def send_close(self, session_id: str) -> asyncio.Future[pb.Reply]:
        """Send a close, and return the future of the reply. The future can be ignored."""

        def fill_call(call: pb.Call) -> None:
            call.close.session_id = session_id

        return self.ignore_failure(self.start_call(fill_call))

    def ignore_failure(self, future: asyncio.Future[pb.Reply]) -> asyncio.Future[pb.Reply]:
        """Return the future, and suppress asyncio's warning if its error is never retrieved."""
        future.add_done_callback(
            lambda done_future: done_future.cancelled() or done_future.exception()
        )
        return future

    def close_opened(self, reply: pb.Reply) -> None:
        """Close the sessions in a reply whose caller was cancelled."""
        open_responses = [reply.open] if reply.HasField("open") else reply.open_group.sessions
        for open_response in open_responses:
            if self.break_reason is None:
                self.send_close(open_response.session_id)

    async def close(self) -> None:
        """End the stream, so that the server closes the stream's sessions."""
        self._break_stream("the client was closed")
        self._duplex.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write_forever(self) -> None:
        try:
            while True:
                await self._has_calls.wait()
                self._has_calls.clear()
                batches = [*self._full_batches, self._batch]
                self._full_batches, self._batch, self._num_batch_bytes = [], pb.CallBatch(), 0
                for batch in batches:
                    self.num_batches_sent += 1
                    await self._duplex.write(batch)
        except (StreamBrokenError, asyncio.InvalidStateError):
            pass  # the reader sees the end of the stream too, and reports the reason

    async def _read_forever(self) -> None:
        try:
            async for batch in self._duplex:
                for reply in batch.replies:
                    self._resolve_call(reply)
            self._break_stream(f"{self._peer_name} ended the connection")
        except StreamBrokenError as error:
            self._break_stream(f"the connection to {self._peer_name} broke: {error}")
        except asyncio.CancelledError:
            self._break_stream(f"the connection to {self._peer_name} was cancelled")
            raise

    def _resolve_call(self, reply: pb.Reply) -> None:
        future, _ = self._pending_calls.pop(reply.call_id, _NO_PENDING_CALL)
        if future is None or future.done():
            self.close_opened(reply)
        elif reply.HasField("error"):
            future.set_exception(read_error(reply.error))
        else:
            future.set_result(reply)

    def _expire_calls(self) -> None:
        self._expiry_timer = None
        now_s = self._loop.time()
        while self._pending_calls:
            call_id, (future, deadline_s) = next(iter(self._pending_calls.items()))
            if deadline_s > now_s:
                self._expiry_timer = self._loop.call_at(deadline_s, self._expire_calls)
                return
            del self._pending_calls[call_id]
            if not future.done():
                future.set_exception(
                    CallTimeoutError(
                        f"{self._peer_name} did not respond within {self._timeout_s:g} s; the"
                        " session is closed"
                    )
                )

    def _break_stream(self, reason: str) -> None:
        if self.break_reason is not None:
            return
        self.break_reason = f"session lost: {reason}; open a new one"
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        pending_calls, self._pending_calls = self._pending_calls, {}
        for future, _ in pending_calls.values():
            if not future.done():
                future.set_exception(ConnectionLostError(self.break_reason))
        self._tasks[0].cancel()
        if self._on_break is not None:
            self._on_break(self.break_reason)


_NO_PENDING_CALL: tuple[None, float] = (None, 0.0)
