"""The client's gRPC wire: one Connect stream carries all sessions (see `call_stream`).

When the stream breaks, every session on it ends with SessionLostError; the next `open`
makes a new stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, NoReturn

import grpc
import orjson

from ludus.env.call_stream import CallStream, StreamBrokenError
from ludus.env.encoding import ResetArgs
from ludus.env.grpc_messages import (
    CONNECTED_KEY,
    fill_reset_args,
    read_description,
    read_error,
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
        self._stream: CallStream | None = None
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

    async def _live_stream(self, patience_s: float) -> CallStream:
        """The stream, made anew when it broke; many callers wait for one attempt."""
        async with self._connecting:
            if self._stream is None or self._stream.broken is not None:
                deadline_s = asyncio.get_running_loop().time() + patience_s
                self._stream = await retry_until(lambda: self._new_stream(deadline_s), patience_s)
            return self._stream

    async def _new_stream(self, deadline_s: float) -> CallStream:
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
        return CallStream(
            GrpcDuplex(call),
            self._options.address,
            timeout_s=self._options.timeout_s,
            on_orphan=self._close_orphan,
        )

    def _close_orphan(self, reply: pb.Reply) -> None:
        if reply.HasField("open") and self._stream is not None:
            GrpcSession(self._stream, reply.open.session_id).abandon()

    async def _unary(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, metadata=self._metadata, timeout=self._options.timeout_s)
        except grpc.aio.AioRpcError as error:
            _raise(error, self._options)


class GrpcSession:
    """One session on a stream."""

    __slots__ = ("_stream", "session_id")

    def __init__(self, stream: CallStream, session_id: str) -> None:
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


class GrpcDuplex:
    """A Connect call as a stream of batches."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, batch: pb.CallBatch) -> None:
        """Returns when the batch is on its way."""
        try:
            await self._call.write(batch)
        except grpc.aio.AioRpcError as error:
            raise StreamBrokenError(error.details() or "") from None

    async def __aiter__(self) -> AsyncIterator[pb.ReplyBatch]:
        """The batches of replies."""
        try:
            async for batch in self._call:
                yield batch
        except grpc.aio.AioRpcError as error:
            raise StreamBrokenError(error.details() or "") from None

    def cancel(self) -> None:
        """Ends the call."""
        self._call.cancel()


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
        return read_error(reply.error)
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
