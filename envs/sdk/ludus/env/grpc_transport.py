"""The client's gRPC wire: one Connect stream carries all sessions.

    step, reset, ... --append--> outgoing batch --writer task--> stream
    stream --reader task--> the call's future --> the waiting coroutine

Everything that is called before the writer gets its turn travels in one batch: all calls
of one event-loop tick, and all that gather while an earlier batch is being written. A
call costs a future and no task. When the stream breaks, every call in flight and every
session on it ends with SessionLostError; the next `open` makes a new stream.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc
import orjson

from ludus.env.encoding import ResetArgs
from ludus.env.grpc_messages import (
    CONNECTED_KEY,
    MAX_BATCH_BYTES,
    fill_reset_args,
    read_description,
    read_result,
)
from ludus.env.transport import ConnectOptions, StepCall, retry_until
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import (
    AuthenticationError,
    CallTimeoutError,
    EnvError,
    SessionLostError,
    UnavailableError,
    error_from_wire,
)

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # else a dead server's backoff outlives its client
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class GrpcTransport:
    """A connection to a server's gRPC port."""

    def __init__(self, options: ConnectOptions) -> None:
        self._options = options
        self._target = options.address.removeprefix("grpc://").rstrip("/")
        authorization = options.authorization
        self._metadata = (("authorization", authorization),) if authorization else ()
        self._channel = grpc.aio.insecure_channel(self._target, options=_CHANNEL_OPTIONS)
        self._stub = env_pb2_grpc.EnvServiceStub(self._channel)
        self._stream: _Stream | None = None
        self._connecting = asyncio.Lock()

    async def connect(self, patience_s: float) -> None:
        """Returns when a stream to the server is up."""
        await self._live_stream(patience_s)

    async def describe(self) -> EnvironmentDescription:
        """What the server says of its environment."""
        return read_description(await self._unary(self._stub.Describe, pb.DescribeRequest()))

    async def open(
        self, reset: ResetArgs | None, close_when_done: bool
    ) -> tuple[GrpcSession, StepResult | None]:
        """A new session on the live stream, which is made anew when it broke."""
        stream = await self._live_stream(self._options.reconnect_timeout_s)
        call, future = stream.begin()
        call.open.close_when_done = close_when_done
        if reset is not None:
            fill_reset_args(call.open.reset, reset)
        response = (await future).open
        first = read_result(response.first) if response.HasField("first") else None
        return GrpcSession(stream, response.session_id), first

    async def step_many(self, calls: Sequence[StepCall]) -> list[StepResult | EnvError]:
        """One result or error per call, in order; they travel as one StepMany."""
        request = pb.StepManyRequest()
        for call in calls:
            _fill_step(request.steps.add(), call.session.session_id, call.action, call.step_index)
        try:
            response = await self._unary(self._stub.StepMany, request)
        except EnvError as error:
            return [error] * len(calls)
        return [_outcome(reply) for reply in response.replies]

    async def close(self) -> None:
        """Ends the stream and with it all its sessions."""
        if self._stream is not None:
            await self._stream.close()
        await self._channel.close()

    async def _live_stream(self, patience_s: float) -> _Stream:
        """The stream, made anew when it broke; many callers wait for one attempt."""
        async with self._connecting:
            if self._stream is None or self._stream.broken is not None:
                deadline_s = asyncio.get_running_loop().time() + patience_s
                self._stream = await retry_until(lambda: self._new_stream(deadline_s), patience_s)
            return self._stream

    async def _new_stream(self, deadline_s: float) -> _Stream:
        call = self._stub.Connect(metadata=self._metadata)
        remaining_s = max(deadline_s - asyncio.get_running_loop().time(), 0.1)
        try:
            await asyncio.wait_for(_connected(call), remaining_s)
        except TimeoutError:
            call.cancel()
            raise UnavailableError(
                f"expected an environment server at {self._options.address}, got no answer;"
                " check the address and that the server runs"
            ) from None
        except grpc.aio.AioRpcError as error:
            _raise(error, self._options)
        return _Stream(call, self._options)

    async def _unary(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, metadata=self._metadata, timeout=self._options.timeout_s)
        except grpc.aio.AioRpcError as error:
            _raise(error, self._options)


class GrpcSession:
    """One session on a stream."""

    __slots__ = ("_stream", "session_id")

    def __init__(self, stream: _Stream, session_id: str) -> None:
        self._stream = stream
        self.session_id = session_id

    async def reset(self, args: ResetArgs) -> StepResult:
        """The first result of a new episode."""
        call, future = self._stream.begin()
        call.reset.session_id = self.session_id
        fill_reset_args(call.reset.args, args)
        return read_result((await future).result)

    async def step(self, action: bytes | str, step_index: int) -> StepResult:
        """The result of an action: bytes are JSON, a str is text."""
        call, future = self._stream.begin(len(action))
        _fill_step(call.step, self.session_id, action, step_index)
        return read_result((await future).result)

    async def state(self) -> JsonObject:
        """The environment's state."""
        call, future = self._stream.begin()
        call.state.session_id = self.session_id
        return orjson.loads((await future).state.state_json)

    async def close(self) -> None:
        """Returns when the server has freed the session; a broken stream freed it already."""
        if self._stream.broken is None:
            await self._send_close()

    def abandon(self) -> None:
        """Lets the server free the session, without waiting for it."""
        if self._stream.broken is None:
            self._stream.ignore(self._send_close())

    def _send_close(self) -> asyncio.Future[pb.Reply]:
        call, future = self._stream.begin()
        call.close.session_id = self.session_id
        return future


class _Stream:
    """One Connect call: its writer, its reader, and the calls in flight."""

    def __init__(self, call: Any, options: ConnectOptions) -> None:
        self.broken: str | None = None
        """Why the stream ended; None while it lives."""
        self.num_batches_sent = 0
        self._call = call
        self._address = options.address
        self._timeout_s = options.timeout_s
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

    def begin(self, num_bytes: int = 0) -> tuple[pb.Call, asyncio.Future[pb.Reply]]:
        """A call to be filled in before the next await, and the future of its reply."""
        if self.broken is not None:
            raise SessionLostError(self.broken)
        if self._batch_bytes > MAX_BATCH_BYTES:
            self._full_batches.append(self._batch)
            self._batch, self._batch_bytes = pb.CallBatch(), 0
        self._batch_bytes += num_bytes
        call = self._batch.calls.add()
        call.call_id = call_id = next(self._call_ids)
        future: asyncio.Future[pb.Reply] = self._loop.create_future()
        self._in_flight[call_id] = (future, self._loop.time() + self._timeout_s)
        if self._expiry is None:
            self._expiry = self._loop.call_later(self._timeout_s, self._expire)
        self._wake.set()
        return call, future

    def ignore(self, future: asyncio.Future[pb.Reply]) -> None:
        """Lets a reply come and go."""
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def close(self) -> None:
        """Ends the stream; the server closes its sessions."""
        self._break("the client was closed")
        self._call.cancel()
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
                    await self._call.write(batch)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader sees the end of the stream too, and says why

    async def _read_forever(self) -> None:
        try:
            async for batch in self._call:
                for reply in batch.replies:
                    self._settle(reply)
            self._break(f"{self._address} ended the connection")
        except grpc.aio.AioRpcError as error:
            self._break(f"the connection to {self._address} broke: {error.details()}")
        except asyncio.CancelledError:
            self._break(f"the connection to {self._address} was cancelled")
            raise

    def _settle(self, reply: pb.Reply) -> None:
        future, _ = self._in_flight.pop(reply.call_id, _NO_CALL)
        if future is None or future.done():
            if reply.HasField("open"):  # nobody waits for this session any more
                GrpcSession(self, reply.open.session_id).abandon()
        elif reply.HasField("error"):
            future.set_exception(error_from_wire(reply.error.code, reply.error.message))
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
                        f"expected an answer from {self._address} within {self._timeout_s:g} s,"
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
                future.set_exception(SessionLostError(self.broken))
        self._tasks[0].cancel()


async def _connected(call: Any) -> None:
    """Returns when the server has accepted the stream, raises AioRpcError when it refuses."""
    await call.wait_for_connection()
    if CONNECTED_KEY in dict(await call.initial_metadata()):
        return
    # A refusal without metadata of its own looks like a connection at first.
    status = await call.code()
    raise grpc.aio.AioRpcError(
        status, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


_NO_CALL: tuple[None, float] = (None, 0.0)


def _fill_step(
    message: pb.StepRequest, session_id: str, action: bytes | str, step_index: int
) -> None:
    message.session_id = session_id
    message.step_index = step_index
    if isinstance(action, bytes):
        message.action_json = action
    else:
        message.action_text = action


def _outcome(reply: pb.StepReply) -> StepResult | EnvError:
    if reply.HasField("error"):
        return error_from_wire(reply.error.code, reply.error.message)
    return read_result(reply.result)


def _raise(error: grpc.aio.AioRpcError, options: ConnectOptions) -> NoReturn:
    """Raises what the status stands for; the server's own code has precedence."""
    details = error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == "ludus-code":
            raise error_from_wire(str(value), details) from None
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        raise AuthenticationError(details) from None
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise CallTimeoutError(
            f"expected an answer from {options.address} within {options.timeout_s:g} s, got none"
        ) from None
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        raise UnavailableError(
            f"expected an environment server at {options.address}, could not reach it:"
            f" {details}; check the address and that the server runs"
        ) from None
    raise EnvError(f"{options.address} answered {error.code().name}: {details}") from error
