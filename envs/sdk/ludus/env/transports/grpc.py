"""The client's gRPC wire: one Connect stream carries all sessions (see `call_stream`).

    open, reset, step, ... --> the live stream --> any server behind the address
                                  | breaks
                                  v
    sessions that survive: the call in flight is sent again, under the same step number,
    on a new stream; all others end with SessionLostError. A survivor that nobody calls is
    asked for its state on the new stream before the server gives it up

A proxy may pass the end of a stream on only when the client says something (Traefik does), so
that a stream with survivors gets an empty call now and then.

The server answers a repeated step number with its first answer, so nothing is done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence

import grpc
import orjson

from ludus.env.backoff import doubling
from ludus.env.encoding import ResetArgs, plain_json
from ludus.env.grpc.call_stream import CallStream, ConnectionLostError
from ludus.env.grpc.server_port import (
    ServerPort,
    channel_options,
    named_server,
    open_channel,
)
from ludus.env.limits import MAX_BATCH_BYTES, MAX_CALLS_PER_MESSAGE
from ludus.env.messages.protobuf import ENVIRONMENT_KEY, fill_open_args, fill_reset_args, read_error
from ludus.env.sessions.interface import OpenArgs
from ludus.env.transports.interface import (
    ConnectOptions,
    OpenedWire,
    StepCall,
    check_group,
    retry_until,
)
from ludus.env.transports.lazy_result import read_result
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import EnvError, InfrastructureError, SessionLostError

_CLOSE_PATIENCE_S = 2.0
_KEPT_AFTER = 1 / 3
"""Of their linger, how long sessions rest until their stream is tried, or they get a new one."""
_RESEND_PAUSE_S = 0.05
_LAST_RESEND_PAUSE_S = 1.0

Fill = Callable[[pb.Call], None]
"""Writes a call; may be asked to do it again on another stream."""


class GrpcTransport:
    """A connection to a server's or a gateway's gRPC port."""

    def __init__(self, options: ConnectOptions) -> None:
        self.reconnect_timeout_s = options.reconnect_timeout_s
        self._options = options
        self._port = ServerPort(
            _open_channel(options),
            str(options.address),
            _metadata_of(options),
            options.timeout_s,
        )
        self._stream: CallStream | None = None
        self._is_closed = False
        self._connecting = asyncio.Lock()
        self._granted_linger_s: float | None = None
        self._surviving: weakref.WeakSet[GrpcSession] = weakref.WeakSet()
        self._stranded: weakref.WeakSet[GrpcSession] = weakref.WeakSet()
        """Survivors that were not called since their stream broke."""
        self._keeping: asyncio.Task[None] | None = None

    async def connect(self, patience_s: float) -> None:
        """Wait for a stream to the server."""
        await self.live_stream(patience_s)
        if self._granted_linger_s is None:
            self._granted_linger_s = (await retry_until(self.describe, patience_s)).linger_s

    async def describe(self) -> EnvironmentDescription:
        """What the server says of its environment."""
        return await self._port.describe()

    async def open(self, args: OpenArgs) -> OpenedWire:
        """A new session on the live stream, which is made again when it broke."""
        stream, reply = await self.call_anywhere(
            lambda call: fill_open_args(call.open, args), self._options.reconnect_timeout_s
        )
        return self._opened(stream, reply.open, args)

    async def open_group(self, args: OpenArgs, size: int) -> list[OpenedWire]:
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
        """One result or error per call, in order; so many as fit travel as one call."""
        parts = await asyncio.gather(*(self._step_together(part) for part in _cut(calls)))
        return list(itertools.chain.from_iterable(parts))

    async def _step_together(self, calls: Sequence[StepCall]) -> list[StepResult | EnvError]:
        def fill(call: pb.Call) -> None:
            add = call.step_many.steps.add
            for session, action, step_index in calls:
                _fill_step(add(), session.session_id, action, step_index)

        patience_s = self._options.reconnect_timeout_s if self._surviving else 0.0
        try:
            _, reply = await self.call_anywhere(fill, patience_s)
        except EnvError as error:
            return [error] * len(calls)
        if self._stranded:
            self._stranded.difference_update(session for session, _, _ in calls)
        return [_outcome(one) for one in reply.step_many.replies]

    async def close(self) -> None:
        """End the stream and with it all its sessions, those that would survive it too."""
        if self._surviving:
            with contextlib.suppress(EnvError, TimeoutError):  # else they linger to their end
                async with asyncio.timeout(_CLOSE_PATIENCE_S):
                    await self._close_surviving()
        stream, self._is_closed = self._stream, True
        if self._keeping is not None:
            self._keeping.cancel()
        if stream is not None:
            await stream.close()
        await self._port.close()

    async def _close_surviving(self) -> None:
        """Tell the server that no session is to outlive its connection."""
        while True:
            stream = await self.live_stream(_CLOSE_PATIENCE_S)
            closing = [stream.send_close(session.session_id) for session in self._surviving]
            await asyncio.wait(closing)
            if stream.broken is None:
                return

    async def call_anywhere(self, fill: Fill, patience_s: float) -> tuple[CallStream, pb.Reply]:
        """The reply to a call, made again when the connection breaks under it.

        Raises:
            UnavailableError: the server went away for longer than `patience_s`.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + patience_s
        pauses = doubling(_RESEND_PAUSE_S, _LAST_RESEND_PAUSE_S)
        while True:
            stream = await self.live_stream(deadline_s - loop.time())
            try:
                return stream, await _taken(stream, stream.begin(fill))
            except ConnectionLostError:
                if self._is_closed or loop.time() >= deadline_s:
                    raise
            await asyncio.sleep(next(pauses))

    async def live_stream(self, patience_s: float) -> CallStream:
        """The stream, made again when it broke; many callers wait for one attempt."""
        async with self._connecting:
            if self._is_closed:
                raise SessionLostError("session lost: the client was closed")
            if self._stream is None or self._stream.broken is not None:
                deadline_s = asyncio.get_running_loop().time() + patience_s
                self._stream = await retry_until(lambda: self._new_stream(deadline_s), patience_s)
            return self._stream

    def _opened(self, stream: CallStream, message: pb.OpenResponse, args: OpenArgs) -> OpenedWire:
        linger_s = max(args.linger_s, self._granted_linger_s or 0.0)
        session = GrpcSession(self, stream, message, linger_s)
        if session.survives_disconnect:
            self._surviving.add(session)
            self._keep()
        return session, read_result(message.first) if message.HasField("first") else None

    async def _new_stream(self, deadline_s: float) -> CallStream:
        remaining_s = max(deadline_s - asyncio.get_running_loop().time(), 0.1)
        return CallStream(
            await self._port.connect(remaining_s),
            str(self._options.address),
            timeout_s=self._options.timeout_s,
            max_calls_per_batch=self._options.max_calls_per_message,
            on_broken=self._strand,
        )

    def was_called(self, session: GrpcSession) -> None:
        """Take note that a session is known on the live stream."""
        self._stranded.discard(session)

    def _strand(self, reason: str) -> None:
        if self._is_closed or not self._surviving:
            return
        self._stranded.update(self._surviving)
        self._keep()

    def _keep(self) -> None:
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.get_running_loop().create_task(self._keep_surviving())

    async def _keep_surviving(self) -> None:
        """Call the sessions that nobody calls on a new stream, before the server gives them up."""
        with contextlib.suppress(EnvError):  # whoever calls them next is told
            while self._surviving:
                lingers_s = min((one.linger_s for one in self._surviving), default=0.0)
                await asyncio.sleep(lingers_s * _KEPT_AFTER)
                stream = await self.live_stream(self.reconnect_timeout_s)
                waiting = [one.move_to(stream) for one in tuple(self._stranded)]
                if not waiting:
                    # An empty call shows whether the stream still lives.
                    waiting = [stream.begin(lambda call: None)]
                self._stranded.clear()
                await asyncio.gather(*waiting, return_exceptions=True)


class GrpcSession:
    """One session; it belongs to a stream unless it survives that."""

    __slots__ = (
        "__weakref__",
        "_stream",
        "linger_s",
        "session_id",
        "tools_session_id",
        "transport",
    )

    def __init__(
        self,
        transport: GrpcTransport,
        stream: CallStream,
        opened: pb.OpenResponse,
        linger_s: float,
    ) -> None:
        self.transport = transport
        self._stream = stream
        self.session_id = opened.session_id
        self.tools_session_id = opened.tools_session_id
        self.linger_s = linger_s

    @property
    def survives_disconnect(self) -> bool:
        """Whether it outlives its stream."""
        return self.linger_s > 0

    def move_to(self, stream: CallStream) -> asyncio.Future[pb.Reply]:
        """The future of a call that makes it known on another stream."""
        future = stream.begin(self._fill_state)
        self._stream = stream
        return future

    async def reset(self, args: ResetArgs) -> StepResult:
        """The first result of a new episode."""

        def fill(call: pb.Call) -> None:
            call.reset.session_id = self.session_id
            fill_reset_args(call.reset.args, args)

        return read_result((await self._call(fill)).result)

    async def step(self, action: bytes | str, step_index: int) -> StepResult:
        """The result of an action: bytes are JSON, a str is text."""

        def fill(call: pb.Call) -> None:
            _fill_step(call.step, self.session_id, action, step_index)

        return read_result((await self._call(fill)).result)

    async def state(self) -> JsonObject:
        """The environment's state."""
        return orjson.loads((await self._call(self._fill_state)).state.state_json)

    async def call_tool(self, name: str, arguments: JsonObject) -> JsonObject:
        """What a tool of the environment returned; a call under which the connection broke fails.

        It has no number, so it cannot be made again without being done twice.
        """

        def fill(call: pb.Call) -> None:
            call.call_tool.session_id = self.session_id
            call.call_tool.name = name
            call.call_tool.arguments_json = plain_json(arguments, "arguments")

        return orjson.loads((await self._stream.begin(fill)).call_tool.result_json)

    async def close(self) -> None:
        """Free the session; a broken stream may have done so."""

        def fill(call: pb.Call) -> None:
            call.close.session_id = self.session_id

        if self._stream.broken is None:
            await self._stream.send_close(self.session_id)
        elif self.survives_disconnect:
            with contextlib.suppress(InfrastructureError):  # its linger ends it anyway
                await self.transport.call_anywhere(fill, _CLOSE_PATIENCE_S)

    def abandon(self) -> None:
        """Let the server free the session, without waiting for it."""
        if self._stream.broken is None:
            self._stream.send_close(self.session_id)

    async def _call(self, fill: Fill) -> pb.Reply:
        try:
            return await self._stream.begin(fill)
        except ConnectionLostError as error:
            return await self._again(fill, error)

    def _fill_state(self, call: pb.Call) -> None:
        call.state.session_id = self.session_id

    async def _again(self, fill: Fill, error: ConnectionLostError) -> pb.Reply:
        """The reply to a call under which the connection broke, where that can be had."""
        if not self.survives_disconnect:
            raise error
        self._stream, reply = await self.transport.call_anywhere(
            fill, self.transport.reconnect_timeout_s
        )
        self.transport.was_called(self)
        return reply


async def _taken(stream: CallStream, future: asyncio.Future[pb.Reply]) -> pb.Reply:
    try:
        return await future
    except asyncio.CancelledError:
        # The reply may have come in the same turn of the loop as the cancellation.
        if future.done() and not future.cancelled() and future.exception() is None:
            stream.close_opened(future.result())
        raise


def _cut(calls: Sequence[StepCall]) -> Iterator[Sequence[StepCall]]:
    """The calls in parts that a server takes at once; an action that it never takes is alone."""
    begin, num_bytes = 0, 0
    for index, (_, action, _) in enumerate(calls):
        size = 0 if isinstance(action, ResetArgs) else len(action)
        is_full = num_bytes + size > MAX_BATCH_BYTES or index - begin == MAX_CALLS_PER_MESSAGE
        if is_full and index > begin:
            yield calls[begin:index]
            begin, num_bytes = index, 0
        num_bytes += size
    if calls:
        yield calls[begin:]


def _metadata_of(options: ConnectOptions) -> tuple[tuple[str, str], ...]:
    metadata = []
    if options.authorization:
        metadata.append(("authorization", options.authorization))
    if options.address.environment:
        metadata.append((ENVIRONMENT_KEY, options.address.environment))
    return tuple(metadata)


def _open_channel(options: ConnectOptions) -> grpc.aio.Channel:
    address = options.address
    return open_channel(
        address.authority,
        options.channel_credentials(),
        (
            *channel_options(options.keepalive_s, options.keepalive_s),
            *named_server(options.server_name if address.is_secure else None),
        ),
    )


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
