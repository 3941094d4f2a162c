"""The gRPC wire: the EnvService of all environments on one port.

    metadata `ludus-env` --> environment
    client stream --call--> server's stream      with a future and a callback, without a task
    client stream <-reply-- server's stream

Other calls become tasks. These are calls that open and close sessions, and calls that wait for a
server or a broken connection. Calls of one session cannot overtake each other on these two paths,
because a client waits for each reply before it sends the next call of the session.
`middleware.AuthenticationInterceptor` checks the caller first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Coroutine
from typing import Any

from ludus.env.grpc.backlog import Backlog, ReplyWriter
from ludus.env.grpc.call_server import (
    CallServer,
    Context,
    abort_call,
    make_status_message,
    parse_batches,
)
from ludus.env.grpc.call_stream import CallStream, ConnectionLostError
from ludus.env.messages import protobuf
from ludus.env.sessions.interface import Connection
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import EnvError
from ludus.services.gateway.sessions.environments import Environments
from ludus.services.gateway.sessions.sessions import GatewaySessions

_RELAYED_KINDS = frozenset({"step", "reset", "state", "call_tool"})


class GatewayServicer(env_pb2_grpc.EnvServiceServicer):
    """The EnvService of all environments of the gateway."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        sessions = await self._find_environment(context)
        try:
            await sessions.admission.wait_until_described()
            return protobuf.make_description_message(sessions.description)
        except EnvError as error:
            await abort_call(context, error)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        return make_status_message("gateway", (await self._find_environment(context)).load)

    async def Connect(self, request_iterator: Any, context: Context) -> None:
        sessions = await self._find_environment(context)
        await context.send_initial_metadata(((protobuf.CONNECTED_KEY, "1"),))
        connection = Connection()
        stream = _ClientStream(sessions, context, connection)
        try:
            await stream.serve(parse_batches(request_iterator))
        except EnvError as error:
            await abort_call(context, error)
        finally:
            sessions.release(connection)

    async def _find_environment(self, context: Context) -> GatewaySessions:
        """Return the environment that the metadata names, by default the only environment."""
        metadata = dict(context.invocation_metadata() or ())
        try:
            return self._environments.find(str(metadata.get(protobuf.ENVIRONMENT_KEY, "")))
        except EnvError as error:
            await abort_call(context, error)


class _ClientStream:
    """One client's stream: its running calls and its pending replies."""

    def __init__(self, sessions: GatewaySessions, context: Context, connection: Connection) -> None:
        self._sessions = sessions
        self._call_server = CallServer(sessions)
        self._replies = ReplyWriter(context.write)
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._backlog = Backlog()
        self._relayed_calls: set[asyncio.Future[pb.Reply]] = set()
        """Calls that were sent on the streams to servers and have no reply yet."""

    async def serve(self, batches: AsyncIterable[pb.CallBatch]) -> None:
        """Serve the stream until it ends."""
        write_task = asyncio.create_task(self._replies.write_forever())
        try:
            async for batch in batches:
                for call in batch.calls:
                    await self._backlog.wait_for_room()
                    await self._replies.wait_for_room()
                    self._start_call(call)
            while running_calls := self._tasks | self._relayed_calls:
                await asyncio.wait(running_calls)
            await self._replies.flush()
        finally:
            write_task.cancel()
            for task in self._tasks:
                task.cancel()

    def _start_call(self, call: pb.Call) -> None:
        kind = call.WhichOneof("call")
        if kind not in _RELAYED_KINDS:
            work = self._call_server.answer_and_queue(
                call, self._replies, self._backlog, self._connection
            )
            self._start_task(work)
            return
        session_id = getattr(call, kind).session_id
        if kind == "step" and call.step.step_index and not call.step.attempt_id:
            call.step.attempt_id = protobuf.make_attempt_id()  # this gateway may repeat the call
        try:
            self._sessions.count_call(kind)
            stream = self._find_live_stream(kind, session_id)
            if stream is None:
                self._start_task(self._call_and_reply(call, kind, session_id))
                return
            future = stream.start_call(lambda server_call: server_call.CopyFrom(call))
        except EnvError as error:
            self._reply_with_error(call, session_id, error)
            return
        self._relayed_calls.add(future)
        self._backlog.add(call.ByteSize())
        self._sessions.tracked_sessions.begin_call(session_id)
        future.add_done_callback(self._make_reply_callback(call, kind, session_id))

    def _find_live_stream(self, kind: str, session_id: str) -> CallStream | None:
        """Return the stream to the session's server, or None if the server is not connected."""
        signed_id = self._sessions.verify_id(session_id, accepts_tools_ids=kind == "call_tool")
        if signed_id.is_tools_only:
            return None  # the server needs the id of the session, not of its tools
        self._sessions.attach((session_id,), self._connection)
        link = self._sessions.fleet.find_link(signed_id.server_id)
        return link.find_live_stream(signed_id.server_id) if link is not None else None

    def _make_reply_callback(
        self, call: pb.Call, kind: str, session_id: str
    ) -> Callable[[asyncio.Future[pb.Reply]], None]:
        started_s = self._loop.time()
        num_bytes = call.ByteSize()

        def finish_call(future: asyncio.Future[pb.Reply]) -> None:
            self._relayed_calls.discard(future)
            self._backlog.remove(num_bytes)
            self._sessions.tracked_sessions.end_call(session_id)
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                reply = future.result()
                seconds = self._loop.time() - started_s
                self._sessions.record_reply(kind, session_id, reply, seconds)
                reply.call_id = call.call_id
                self._replies.put(reply)
            elif isinstance(error, ConnectionLostError) and _is_repeatable(call, kind):
                self._start_task(self._call_and_reply(call, kind, session_id))
            elif isinstance(error, EnvError):
                self._sessions.record_failure(kind, session_id, error, 0.0)
                self._reply_with_error(call, session_id, error)

        return finish_call

    async def _call_and_reply(self, call: pb.Call, kind: str, session_id: str) -> None:
        """Wait for the session's server, call it, and send its reply to the client."""
        num_bytes, is_repeatable = call.ByteSize(), _is_repeatable(call, kind)
        self._backlog.add(num_bytes)
        try:
            reply = await self._sessions.call(kind, session_id, call, is_repeatable=is_repeatable)
        except EnvError as error:
            self._reply_with_error(call, session_id, error)
            return
        finally:
            self._backlog.remove(num_bytes)
        reply.call_id = call.call_id
        self._replies.put(reply)

    def _reply_with_error(self, call: pb.Call, session_id: str, error: EnvError) -> None:
        reply = pb.Reply(call_id=call.call_id)
        protobuf.fill_error(reply.error, error, session_id)
        self._replies.put(reply)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_repeatable(call: pb.Call, kind: str) -> bool:
    """Return whether a call may be sent again: a numbered step, a reset or a read of the state."""
    if kind == "step":
        return bool(call.step.step_index)
    return kind in ("reset", "state")
