"""StepStream, the streamed StepMany: requests one after another, responses in their order.

    ask --request--> stream --> answer_in_order --> stream --response--> the oldest ask

A message on a stream costs about half of a unary call, which is much of what a step costs when
64 sessions step together. Both halves pass messages on as they are, parsed or as bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

_MAX_AHEAD = 16
"""Requests of one stream that are answered at once."""


class StepStream(Generic[RequestT, ResponseT]):
    """The asking half of a stream.

    Args:
        call: a grpc.aio stream-stream call.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._waiting: deque[asyncio.Future[ResponseT]] = deque()
        self._writing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._failure: grpc.aio.AioRpcError | None = None
        self._reading = self._loop.create_task(self._read_forever())

    @property
    def is_broken(self) -> bool:
        """True when it can no longer be asked."""
        return self._failure is not None or self._reading.done()

    async def ask(self, request: RequestT) -> ResponseT:
        """The response to the request; a caller that gives up disturbs nobody else.

        Raises:
            AioRpcError: the stream ended before.
        """
        future: asyncio.Future[ResponseT] = self._loop.create_future()
        async with self._writing:  # the order of futures is the order of requests
            if self._failure is not None:
                raise self._failure
            self._waiting.append(future)
            # Shielded: a request is sent whole or not at all, whoever gives up.
            await asyncio.shield(self._loop.create_task(self._write(request)))
        return await future

    async def close(self) -> None:
        """Ends the stream."""
        self._call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _write(self, request: RequestT) -> None:
        # The reader sees the end of the stream too, and says why.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(request)

    async def _read_forever(self) -> None:
        try:
            async for response in self._call:
                future = self._waiting.popleft()
                if not future.done():
                    future.set_result(response)
            failure = _ended("the other side ended the stream")
        except grpc.aio.AioRpcError as error:
            failure = error
        except asyncio.CancelledError:
            failure = _ended("the stream was closed")
        self._failure = failure
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(failure)


async def read_ahead(requests: AsyncIterable[RequestT]) -> AsyncGenerator[RequestT, None]:
    """The requests, of which a few are read while an earlier one is being answered.

    A reading takes a hop to another thread and back, and nothing else would be done meanwhile.
    """
    waiting: asyncio.Queue[RequestT | _End] = asyncio.Queue(_MAX_AHEAD)

    async def read() -> None:
        async for request in requests:
            await waiting.put(request)
        await waiting.put(_End())

    reading = asyncio.create_task(read())
    reading.add_done_callback(lambda done: _wake_after_failure(done, waiting))
    try:
        while not isinstance(request := await waiting.get(), _End):
            yield request
        await reading
    finally:
        reading.cancel()


class _End:
    """After the last request."""


def _wake_after_failure(reading: asyncio.Task[None], waiting: asyncio.Queue[Any]) -> None:
    if reading.cancelled() or reading.exception() is None:
        return
    while waiting.full():
        waiting.get_nowait()  # the stream has broken: nobody could be answered any more
    waiting.put_nowait(_End())


async def answer_in_order(
    requests: AsyncIterable[RequestT],
    answer: Callable[[RequestT], Awaitable[ResponseT]],
    write: Callable[[ResponseT], Awaitable[None]],
) -> None:
    """Returns when every request is answered; answers are worked out at once, sent in order."""
    answers: asyncio.Queue[asyncio.Future[ResponseT] | None] = asyncio.Queue(_MAX_AHEAD)

    async def write_all() -> None:
        while (answered := await answers.get()) is not None:
            await write(await answered)

    writing = asyncio.create_task(write_all())
    begun: set[asyncio.Future[ResponseT]] = set()
    try:
        async for request in requests:
            task: asyncio.Future[ResponseT] = asyncio.ensure_future(answer(request))
            begun.add(task)
            task.add_done_callback(begun.discard)
            await _put_unless_done(answers, task, writing)
        await _put_unless_done(answers, None, writing)
        await writing
    finally:
        writing.cancel()
        for unsent in begun:
            unsent.cancel()


async def _put_unless_done(
    queue: asyncio.Queue[Any], item: Any, writing: asyncio.Task[None]
) -> None:
    """Returns when the item is queued; raises what ended the writer, should it have ended."""
    if not queue.full():
        queue.put_nowait(item)
        if writing.done():
            writing.result()
        return
    putting = asyncio.ensure_future(queue.put(item))
    await asyncio.wait((putting, writing), return_when=asyncio.FIRST_COMPLETED)
    if writing.done():
        putting.cancel()
        writing.result()


def _ended(why: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), why
    )
