"""The client's gRPC wire: one Connect stream carries all sessions (see `call_stream`).

    open, reset, step, ... --> the live stream --> any server behind the address
                                  | breaks
                                  v
    sessions that survive: the call in flight is sent again, under the same step number,
    on a new stream; all others end with SessionLostError

The server answers a repeated step number with its first answer, so nothing is done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NoReturn

import grpc
import orjson

from ludus.env.encoding import ResetArgs
from ludus.env.grpc.call_stream import CallStream, ConnectionLostError, StreamBrokenError
from ludus.env.grpc.step_stream import StepStream
from ludus.env.messages.protobuf import (
    CONNECTED_KEY,
    fill_open_args,
    fill_reset_args,
    read_description,
    read_error,
)
from ludus.env.security.client_tls import grpc_credentials
from ludus.env.security.tracing import is_traced, trace_headers
from ludus.env.sessions.interface import OpenArgs
from ludus.env.transports.interface import (
    ConnectOptions,
    Opened,
    StepCall,
    check_group,
    retry_until,
)
from ludus.env.transports.lazy_result import read_result
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import (
    AuthenticationError,
    CallTimeoutError,
    EnvError,
    InfrastructureError,
    SessionLostError,
    UnavailableError,
    error_from_wire,
)

ENVIRONMENT_KEY = "ludus-env"
"""Metadata that names an environment at a gateway."""
_CLOSE_PATIENCE_S = 2.0
_RESEND_PAUSE_S = 0.05
_LAST_RESEND_PAUSE_S = 1.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # else a dead server's backoff outlives its client
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
)
"""How whoever calls a server reaches it; keepalive comes on top."""

_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
"""What gRPC itself says of a connection that broke; INTERNAL when it broke under a message."""

Fill = Callable[[pb.Call], None]
"""Writes a call; may be asked to do it again on another stream."""


class UnimplementedError(EnvError):
    """The other side knows no such call."""


class GrpcTransport:
    """A connection to a server's or a gateway's gRPC port."""

    def __init__(self, options: ConnectOptions) -> None:
        self.reconnect_timeout_s = options.reconnect_timeout_s
        self._options = options
        self._metadata = _metadata_of(options)
        self.channel = _open_channel(options)
        self._stub = env_pb2_grpc.EnvServiceStub(self.channel)
        self._stream: CallStream | None = None
        self._steps: StepStream[pb.StepManyRequest, pb.StepManyResponse] | None = None
        self._is_closed = False
        self._connecting = asyncio.Lock()
        self._granted_linger_s: float | None = None
        self._surviving: weakref.WeakSet[GrpcSession] = weakref.WeakSet()

    async def connect(self, patience_s: float) -> None:
        """Returns when a stream to the server is up."""
        await self.live_stream(patience_s)
        if self._granted_linger_s is None:
            self._granted_linger_s = (await self.describe()).linger_s

    async def describe(self) -> EnvironmentDescription:
        """What the server says of its environment."""
        return read_description(await self.unary(self._stub.Describe, pb.DescribeRequest()))

    async def open(self, args: OpenArgs) -> Opened:
        """A new session on the live stream, which is made again when it broke."""
        stream, reply = await self.call_anywhere(
            lambda call: fill_open_args(call.open, args), self._options.reconnect_timeout_s
        )
        return self._opened(stream, reply.open, args)

    async def open_group(self, args: OpenArgs, size: int) -> list[Opened]:
        """Sessions on one seed, all or none, whose first results are the same."""

        def fill(call: pb.Call) -> None:
            fill_open_args(call.open_group.open, args)
            call.open_group.size = size

        stream, reply = await self.call_anywhere(fill, self._options.reconnect_timeout_s)
        opened = [self._opened(stream, one, args) for one in reply.open_group.sessions]
        try:
            check_group((first for _, first in opened), args.reset.seed if args.reset else None)
        except EnvError:
            for session, _ in opened:
                session.abandon()
            raise
        return opened

    async def step_many(self, calls: Sequence[StepCall]) -> list[StepResult | EnvError]:
        """One result or error per call, in order; they travel as one StepMany."""
        if not calls:
            return []
        request = pb.StepManyRequest()
        add = request.steps.add
        for session, action, step_index in calls:
            _fill_step(add(), session.session_id, action, step_index)
        try:
            response = await self._step_many_or_again(request)
        except EnvError as error:
            return [error] * len(calls)
        return [_outcome(reply) for reply in response.replies]

    async def close(self) -> None:
        """Ends the stream and with it all its sessions, those that would survive it too."""
        if self._surviving:
            with contextlib.suppress(EnvError, TimeoutError):  # else they linger to their end
                async with asyncio.timeout(_CLOSE_PATIENCE_S):
                    await self._close_surviving()
        stream, self._is_closed = self._stream, True
        if self._steps is not None:
            await self._steps.close()
        if stream is not None:
            await stream.close()
        await self.channel.close()

    async def _close_surviving(self) -> None:
        """Returns when the server has heard that no session is to outlive its connection."""
        while True:
            stream = await self.live_stream(_CLOSE_PATIENCE_S)
            closing = [session.send_close(stream) for session in self._surviving]
            for future in closing:
                stream.ignore(future)
            await asyncio.wait(closing)
            if stream.broken is None:
                return

    async def unary(self, method: Any, request: Any) -> Any:
        """The answer to a call outside the stream; errors are typed."""
        metadata = self._metadata
        if is_traced():
            metadata = (*metadata, *trace_headers().items())
        try:
            return await method(request, metadata=metadata, timeout=self._options.timeout_s)
        except grpc.aio.AioRpcError as error:
            _raise(error, self._options)

    async def call_anywhere(self, fill: Fill, patience_s: float) -> tuple[CallStream, pb.Reply]:
        """The reply to a call, made again when the connection breaks under it.

        Raises:
            UnavailableError: the server went away for longer than `patience_s`.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + patience_s
        pause_s = _RESEND_PAUSE_S
        while True:
            stream = await self.live_stream(deadline_s - loop.time())
            try:
                call, future = stream.begin()
                fill(call)
                return stream, await self._taken(future)
            except ConnectionLostError:
                if self._is_closed or loop.time() >= deadline_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_RESEND_PAUSE_S)

    async def _taken(self, future: asyncio.Future[pb.Reply]) -> pb.Reply:
        try:
            return await future
        except asyncio.CancelledError:
            # The reply may have come in the same turn of the loop as the cancellation.
            if future.done() and not future.cancelled() and future.exception() is None:
                self._close_orphan(future.result())
            raise

    async def live_stream(self, patience_s: float) -> CallStream:
        """The stream, made again when it broke; many callers wait for one attempt."""
        async with self._connecting:
            if self._is_closed:
                raise SessionLostError("session lost: the client was closed")
            if self._stream is None or self._stream.broken is not None:
                deadline_s = asyncio.get_running_loop().time() + patience_s
                self._stream = await retry_until(lambda: self._new_stream(deadline_s), patience_s)
            return self._stream

    def _opened(self, stream: CallStream, message: pb.OpenResponse, args: OpenArgs) -> Opened:
        survives = max(args.linger_s, self._granted_linger_s or 0.0) > 0
        session = GrpcSession(self, stream, message.session_id, survives)
        if survives:
            self._surviving.add(session)
        return session, read_result(message.first) if message.HasField("first") else None

    async def _step_many_or_again(self, request: pb.StepManyRequest) -> pb.StepManyResponse:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._options.reconnect_timeout_s
        while True:
            try:
                return await self._step_together(request)
            except UnavailableError:
                if not self._surviving or loop.time() >= deadline_s:
                    raise
            await asyncio.sleep(_RESEND_PAUSE_S)
            await self.live_stream(deadline_s - loop.time())

    async def _step_together(self, request: pb.StepManyRequest) -> pb.StepManyResponse:
        if is_traced():  # a stream's messages carry no trace of their own
            return await self.unary(self._stub.StepMany, request)
        if self._steps is None or self._steps.is_broken:
            self._steps = StepStream(self._stub.StepStream(metadata=self._metadata))
        try:
            async with asyncio.timeout(self._options.timeout_s):
                return await self._steps.ask(request)
        except grpc.aio.AioRpcError as error:
            _raise(error, self._options)
        except TimeoutError:
            raise _too_slow(self._options) from None

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
            str(self._options.address),
            timeout_s=self._options.timeout_s,
            max_calls_per_batch=self._options.max_calls_per_message,
            on_orphan=self._close_orphan,
        )

    def _close_orphan(self, reply: pb.Reply) -> None:
        """Frees sessions whose opener has given up."""
        opened = [reply.open] if reply.HasField("open") else reply.open_group.sessions
        stream = self._stream
        for one in opened:
            if stream is not None and stream.broken is None:
                GrpcSession(self, stream, one.session_id, False).abandon()


class GrpcSession:
    """One session; it belongs to a stream unless it survives that."""

    __slots__ = ("__weakref__", "_stream", "session_id", "survives_disconnect", "transport")

    def __init__(
        self,
        transport: GrpcTransport,
        stream: CallStream,
        session_id: str,
        survives_disconnect: bool,
    ) -> None:
        self.transport = transport
        self._stream = stream
        self.session_id = session_id
        self.survives_disconnect = survives_disconnect

    async def reset(self, args: ResetArgs) -> StepResult:
        """The first result of a new episode."""

        def fill(call: pb.Call) -> None:
            call.reset.session_id = self.session_id
            fill_reset_args(call.reset.args, args)

        return read_result((await self._call(fill)).result)

    async def step(self, action: bytes | str, step_index: int) -> StepResult:
        """The result of an action: bytes are JSON, a str is text."""
        try:
            call, future = self._stream.begin(len(action))
            _fill_step(call.step, self.session_id, action, step_index)
            reply = await future
        except ConnectionLostError as error:
            reply = await self._again(
                lambda call: _fill_step(call.step, self.session_id, action, step_index), error
            )
        return read_result(reply.result)

    async def state(self) -> JsonObject:
        """The environment's state."""

        def fill(call: pb.Call) -> None:
            call.state.session_id = self.session_id

        return orjson.loads((await self._call(fill)).state.state_json)

    async def call_tool(self, name: str, arguments: JsonObject) -> JsonObject:
        """What a tool of the environment returned; a call under which the connection broke fails.

        It has no number, so it cannot be made again without being done twice.
        """
        call, future = self._stream.begin()
        call.call_tool.session_id = self.session_id
        call.call_tool.name = name
        call.call_tool.arguments_json = orjson.dumps(arguments)
        return orjson.loads((await future).call_tool.result_json)

    async def close(self) -> None:
        """Returns when the server has freed the session; a broken stream may have done so."""
        if self._stream.broken is None:
            await self.send_close(self._stream)
        elif self.survives_disconnect:
            with contextlib.suppress(InfrastructureError):  # its linger ends it anyway
                await self.transport.call_anywhere(self._fill_close, _CLOSE_PATIENCE_S)

    def abandon(self) -> None:
        """Lets the server free the session, without waiting for it."""
        if self._stream.broken is None:
            self._stream.ignore(self.send_close(self._stream))

    def send_close(self, stream: CallStream) -> asyncio.Future[pb.Reply]:
        """The future of the answer to a close."""
        call, future = stream.begin()
        self._fill_close(call)
        return future

    def _fill_close(self, call: pb.Call) -> None:
        call.close.session_id = self.session_id

    async def _call(self, fill: Fill) -> pb.Reply:
        try:
            call, future = self._stream.begin()
            fill(call)
            return await future
        except ConnectionLostError as error:
            return await self._again(fill, error)

    async def _again(self, fill: Fill, error: ConnectionLostError) -> pb.Reply:
        """The reply to a call under which the connection broke, where that can be had."""
        if not self.survives_disconnect:
            raise error
        self._stream, reply = await self.transport.call_anywhere(
            fill, self.transport.reconnect_timeout_s
        )
        return reply


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


def _metadata_of(options: ConnectOptions) -> tuple[tuple[str, str], ...]:
    metadata = []
    if options.authorization:
        metadata.append(("authorization", options.authorization))
    if options.address.environment:
        metadata.append((ENVIRONMENT_KEY, options.address.environment))
    return tuple(metadata)


def _open_channel(options: ConnectOptions) -> grpc.aio.Channel:
    keepalive_ms = round(options.keepalive_s * 1000)
    channel_options = (
        *CHANNEL_OPTIONS,
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        # A bandwidth probe that got no answer would keep the keepalive waiting for a minute.
        ("grpc.http2.ping_timeout_ms", keepalive_ms),
    )
    target = options.address.authority
    if not options.address.is_secure:
        return grpc.aio.insecure_channel(target, options=channel_options)
    credentials = grpc_credentials(options.ca_file)
    return grpc.aio.secure_channel(target, credentials, options=channel_options)


def _fill_step(
    message: pb.StepRequest, session_id: str, action: bytes | str | ResetArgs, step_index: int
) -> None:
    message.session_id = session_id
    if isinstance(action, bytes):
        message.step_index = step_index
        message.action_json = action
    elif isinstance(action, str):
        message.step_index = step_index
        message.action_text = action
    else:
        fill_reset_args(message.reset, action)


def _outcome(reply: pb.StepReply) -> StepResult | EnvError:
    if reply.HasField("error"):
        return read_error(reply.error)
    return read_result(reply.result)


def _raise(error: grpc.aio.AioRpcError, options: ConnectOptions) -> NoReturn:
    """Raises what the status stands for; the server's own code has precedence."""
    details = error.details() or ""
    metadata = dict(error.trailing_metadata() or ())
    if "ludus-code" in metadata:
        retry_after_ms = str(metadata.get("retry-after-ms", ""))
        retry_after_s = int(retry_after_ms) / 1000 if retry_after_ms.isdecimal() else 0.0
        raise error_from_wire(str(metadata["ludus-code"]), details, retry_after_s) from None
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        raise AuthenticationError(details) from None
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise _too_slow(options) from None
    if error.code() in _BROKEN:
        raise UnavailableError(
            f"expected an environment server at {options.address}, could not reach it:"
            f" {details}; check the address and that the server runs"
        ) from None
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        raise UnimplementedError(f"{options.address} does not offer this call: {details}") from None
    raise EnvError(f"{options.address} answered {error.code().name}: {details}") from error


def _too_slow(options: ConnectOptions) -> CallTimeoutError:
    return CallTimeoutError(
        f"expected an answer from {options.address} within {options.timeout_s:g} s, got none"
    )
