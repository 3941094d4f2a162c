"""The client's gRPC wire: one Connect stream carries all sessions (see `call_stream`).

    open, reset, step, ... --> the live stream --> any server behind the address
                                  | breaks
                                  v
    a session that outlives its stream: its pending call is sent again, with the same step number,
    on a new stream; every other session ends with SessionLostError

    open --> DRAINING --> a new connection, which reaches another server; sessions that are already
    open stay on the old connection

If a step number is repeated, the server returns its first response, so no step is taken twice. The
client queries a session without calls on the new stream, before the server closes the session.

Some proxies, such as Traefik, report the end of a stream only when the client sends something. A
stream with sessions that outlive it therefore regularly sends an empty call.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable

import orjson

from ludus.env.backoff import (
    is_draining_error,
    retry,
    retry_on_new_connection,
    retry_unavailable,
)
from ludus.env.encoding import ResetArgs
from ludus.env.grpc.call_stream import CallStream, ConnectionLostError
from ludus.env.grpc.server_port import GrpcClient, open_channel
from ludus.env.messages.protobuf import (
    ENVIRONMENT_KEY,
    fill_call_tool,
    fill_open_args,
    fill_reset_args,
    fill_step,
    make_attempt_id,
    read_result,
    read_tool_result,
)
from ludus.env.sessions.interface import OpenArgs
from ludus.env.transports.address import RemoteServer
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult, ToolResult
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import (
    EnvError,
    InfrastructureError,
    SessionLostError,
    UnavailableError,
)

_CLOSE_TIMEOUT_S = 2.0
KEEP_ALIVE_FRACTION = 1 / 3
"""Fraction of a session's linger time after which its stream is probed, or replaced if broken."""

FillCall = Callable[[pb.Call], None]
"""Function that writes a call. It may be called again for another stream."""


class GrpcTransport:
    """A connection to the gRPC port of a server or a gateway."""

    def __init__(self, server: RemoteServer) -> None:
        self.server = server
        self.reconnect_timeout_s = server.options.reconnect_timeout_s
        self._client = _make_client(server)
        self.stream: CallStream | None = None
        """The stream for new sessions; None before the first connection and after a refusal."""
        self._draining_connections: dict[CallStream, GrpcClient] = {}
        """Connections to servers that accept no new sessions, with the clients that own them."""
        self._sessions: weakref.WeakSet[GrpcSession] = weakref.WeakSet()
        self._close_tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._connect_lock = asyncio.Lock()
        self._granted_linger_s: float | None = None
        self.surviving_sessions: weakref.WeakSet[GrpcSession] = weakref.WeakSet()
        """Sessions that outlive their stream."""
        self._keep_task: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        """Number of connections, including those to draining servers with sessions."""
        return 1 + len(self._draining_connections)

    async def connect(self, timeout_s: float) -> None:
        """Open a stream to the server."""
        await self.get_live_stream(timeout_s)
        if self._granted_linger_s is None:
            self._granted_linger_s = (await retry_unavailable(self.describe, timeout_s)).linger_s

    async def describe(self) -> EnvironmentDescription:
        """Return the server's description of its environment."""
        return await self._client.describe()

    async def open(self, args: OpenArgs) -> tuple[GrpcSession, StepResult | None]:
        """Open a session. A broken stream, or a stream to a draining server, is replaced."""
        stream, reply = await self._call_open(lambda call: fill_open_args(call.open, args))
        return self._add_session(stream, reply.open, args)

    async def open_group(
        self, args: OpenArgs, size: int
    ) -> list[tuple[GrpcSession, StepResult | None]]:
        """Open `size` sessions with one seed and equal first results. If one fails, open none."""

        def fill(call: pb.Call) -> None:
            fill_open_args(call.open_group.open, args)
            call.open_group.size = size

        stream, reply = await self._call_open(fill)
        sessions = reply.open_group.sessions
        return [self._add_session(stream, open_response, args) for open_response in sessions]

    async def close(self) -> None:
        """Close the stream and all sessions, including those that would outlive the stream."""
        if self.surviving_sessions:
            # If closing fails, the server ends the sessions after their linger time.
            with contextlib.suppress(EnvError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._close_surviving_sessions()
        stream, self._is_closed = self.stream, True
        if self._keep_task is not None:
            self._keep_task.cancel()
        if stream is not None:
            await stream.close()
        await self._client.close()
        for draining_stream in list(self._draining_connections):
            self._start_to_close(draining_stream)
        await asyncio.gather(*self._close_tasks)

    async def _close_surviving_sessions(self) -> None:
        sessions = list(self.surviving_sessions)
        while sessions:
            for session in sessions:
                if session.stream.break_reason is not None:
                    session.stream = await self.get_live_stream(_CLOSE_TIMEOUT_S)
            await asyncio.wait(
                [session.stream.send_close(session.session_id) for session in sessions]
            )
            sessions = [session for session in sessions if session.stream.break_reason is not None]

    async def _call_open(self, fill: FillCall) -> tuple[CallStream, pb.Reply]:
        """Return the reply to an open, which is repeated elsewhere if its server is draining."""
        return await retry_on_new_connection(
            lambda: self.retry_call(fill, self.reconnect_timeout_s), is_draining_error
        )

    async def retry_call(self, fill: FillCall, timeout_s: float) -> tuple[CallStream, pb.Reply]:
        """Return the reply to a call, which is repeated on a new stream when its stream breaks.

        Raises:
            UnavailableError: the server was unavailable for longer than `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s

        async def attempt_call() -> tuple[CallStream, pb.Reply]:
            stream = await self.get_live_stream(deadline_s - loop.time())
            try:
                return stream, await _wait_for_reply(stream, stream.start_call(fill))
            except UnavailableError as error:
                if is_draining_error(error):
                    self._leave_server(stream)
                raise

        return await retry(
            attempt_call,
            lambda error: isinstance(error, ConnectionLostError) and not self._is_closed,
            timeout_s,
        )

    async def get_live_stream(self, timeout_s: float) -> CallStream:
        """Return the stream, or a new stream if it broke. All callers wait for the same attempt."""
        async with self._connect_lock:
            if self._is_closed:
                raise SessionLostError("session lost: the client was closed")
            if self.stream is None or self.stream.break_reason is not None:
                deadline_s = asyncio.get_running_loop().time() + timeout_s
                self.stream = await retry_unavailable(
                    lambda: self._open_stream(deadline_s), timeout_s
                )
            return self.stream

    def _leave_server(self, stream: CallStream) -> None:
        """Use a new connection for new sessions, because the server of the stream is draining.

        A channel has one connection, so only a new channel can reach another server.
        """
        if self.stream is stream and stream.break_reason is None and not self._is_closed:
            self._draining_connections[stream] = self._client
            self.stream, self._client = None, _make_client(self.server)
        self._close_unused_connections()

    def _close_unused_connections(self) -> None:
        """Close the connections to draining servers that have neither sessions nor calls."""
        if not self._draining_connections:
            return
        used_streams = {session.stream for session in self._sessions}
        for stream in list(self._draining_connections):
            if stream.break_reason is not None or not (
                stream in used_streams or stream.has_pending_calls
            ):
                self._start_to_close(stream)

    def _start_to_close(self, stream: CallStream) -> None:
        client = self._draining_connections.pop(stream)

        async def close_connection() -> None:
            await stream.close()
            await client.close()

        task = asyncio.get_running_loop().create_task(close_connection())
        self._close_tasks.add(task)
        task.add_done_callback(self._close_tasks.discard)

    def remove_session(self, session: GrpcSession) -> None:
        """Forget a session that was closed, and the connection that only it used."""
        self._sessions.discard(session)
        self._close_unused_connections()

    def _add_session(
        self, stream: CallStream, open_response: pb.OpenResponse, args: OpenArgs
    ) -> tuple[GrpcSession, StepResult | None]:
        linger_s = max(args.linger_s, self._granted_linger_s or 0.0)
        session = GrpcSession(self, stream, open_response, linger_s)
        self._sessions.add(session)
        if session.survives_disconnect:
            self.surviving_sessions.add(session)
            self._start_keep_task()
        first_result = read_result(open_response.first) if open_response.HasField("first") else None
        return session, first_result

    async def _open_stream(self, deadline_s: float) -> CallStream:
        remaining_s = max(deadline_s - asyncio.get_running_loop().time(), 0.1)
        return CallStream(
            await self._client.connect(remaining_s),
            str(self.server.address),
            timeout_s=self.server.options.timeout_s,
            max_calls_per_batch=self.server.options.max_calls_per_message,
            on_break=self._handle_break,
        )

    def _handle_break(self, reason: str) -> None:
        self._close_unused_connections()
        if self.surviving_sessions and not self._is_closed:
            self._start_keep_task()

    def _start_keep_task(self) -> None:
        if self._keep_task is None or self._keep_task.done():
            self._keep_task = asyncio.get_running_loop().create_task(self._keep_sessions())

    async def _keep_sessions(self) -> None:
        """Move sessions without calls to a new stream before the server closes them."""
        with contextlib.suppress(EnvError):  # the next call of a session raises the error again
            while self.surviving_sessions:
                linger_times_s = [session.linger_s for session in self.surviving_sessions]
                linger_s = min(linger_times_s, default=0.0)
                await asyncio.sleep(linger_s * KEEP_ALIVE_FRACTION)
                await self._move_sessions()
                # The reply to an empty call shows that the stream is alive.
                streams = {session.stream for session in self.surviving_sessions}
                live_streams = [stream for stream in streams if stream.break_reason is None]
                probes = [stream.start_call(lambda call: None) for stream in live_streams]
                await asyncio.gather(*probes, return_exceptions=True)

    async def _move_sessions(self) -> None:
        """Make a call of each session with a broken stream on a live stream."""
        if all(session.stream.break_reason is None for session in self.surviving_sessions):
            return
        stream = await self.get_live_stream(self.reconnect_timeout_s)
        reply_futures = [
            session.move_to(stream)
            for session in self.surviving_sessions
            if session.stream.break_reason is not None
        ]
        await asyncio.gather(*reply_futures, return_exceptions=True)


class GrpcSession:
    """One session, which ends with its stream unless it has a linger time.

    `WireSession` documents its methods.
    """

    def __init__(
        self,
        transport: GrpcTransport,
        stream: CallStream,
        open_response: pb.OpenResponse,
        linger_s: float,
    ) -> None:
        self.transport = transport
        self.stream = stream
        """Stream of the session's last call."""
        self.session_id = open_response.session_id
        self.tools_session_id = open_response.tools_session_id
        self.linger_s = linger_s
        self.survives_disconnect = linger_s > 0

    def move_to(self, stream: CallStream) -> asyncio.Future[pb.Reply]:
        """Make a call of the session on another stream, and return the future of the reply."""
        reply_future = stream.start_call(self._fill_state)
        self.stream = stream
        return reply_future

    async def reset(self, args: ResetArgs) -> StepResult:
        def fill(call: pb.Call) -> None:
            call.reset.session_id = self.session_id
            fill_reset_args(call.reset.args, args)

        return read_result((await self._call(fill)).result)

    async def step(self, action: bytes | str, step_index: int) -> StepResult:
        attempt_id = make_attempt_id()

        def fill(call: pb.Call) -> None:
            fill_step(call.step, self.session_id, action, step_index, attempt_id)

        return read_result((await self._call(fill)).result)

    async def state(self) -> JsonObject:
        reply = await self._call(self._fill_state)
        state: JsonObject = orjson.loads(reply.state.state_json)
        return state

    async def call_tool(self, name: str, arguments: JsonObject) -> ToolResult:
        def fill(call: pb.Call) -> None:
            fill_call_tool(call.call_tool, self.session_id, name, arguments)

        if self.stream.break_reason is not None:
            await self._call(self._fill_state)
        # A tool call has no step number, so it cannot be repeated when the connection breaks.
        reply = await self.stream.start_call(fill)
        return read_tool_result(reply.call_tool)

    async def close(self) -> None:
        try:
            if self.stream.break_reason is None:
                await self.stream.send_close(self.session_id)
            elif self.survives_disconnect:
                with contextlib.suppress(InfrastructureError):  # it ends after its linger time
                    await self.transport.retry_call(self._fill_close, _CLOSE_TIMEOUT_S)
        finally:
            self.transport.remove_session(self)

    def abandon(self) -> None:
        if self.stream.break_reason is None:
            future = self.stream.send_close(self.session_id)
            future.add_done_callback(lambda _: self.transport.remove_session(self))

    async def _call(self, fill: FillCall) -> pb.Reply:
        try:
            return await self.stream.start_call(fill)
        except ConnectionLostError:
            if not self.survives_disconnect:
                raise
        self.stream, reply = await self.transport.retry_call(
            fill, self.transport.reconnect_timeout_s
        )
        return reply

    def _fill_state(self, call: pb.Call) -> None:
        call.state.session_id = self.session_id

    def _fill_close(self, call: pb.Call) -> None:
        call.close.session_id = self.session_id


async def _wait_for_reply(stream: CallStream, future: asyncio.Future[pb.Reply]) -> pb.Reply:
    try:
        return await future
    except asyncio.CancelledError:
        # The reply may have arrived in the same turn of the event loop as the cancellation.
        if future.done() and not future.cancelled() and future.exception() is None:
            stream.close_opened(future.result())
        raise


def _make_client(server: RemoteServer) -> GrpcClient:
    """Return a client with a new channel, which connects when it is first used."""
    options = server.options
    channel = open_channel(
        server.address.authority,
        server.make_channel_credentials(),
        options.server_name,
        keepalive_s=options.keepalive_s,
        keepalive_timeout_s=options.keepalive_s,
    )
    metadata = _make_metadata(server)
    return GrpcClient(channel, str(server.address), lambda: metadata, options.timeout_s)


def _make_metadata(server: RemoteServer) -> tuple[tuple[str, str], ...]:
    metadata = []
    if server.authorization:
        metadata.append(("authorization", server.authorization))
    if server.address.environment_name:
        metadata.append((ENVIRONMENT_KEY, server.address.environment_name))
    return tuple(metadata)
