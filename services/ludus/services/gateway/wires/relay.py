"""Relay of the calls of a client's stream to the streams of the servers.

    client stream --call--> server's stream      a future and a callback, no task, no re-encoding
    client stream <-reply-- server's stream

Other calls become tasks: opening and closing sessions, and calls that wait for a server or a
broken connection. A client waits for the reply to one call before it sends the next call of the
same session, so the two paths need no common order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any

from ludus.env.grpc.backlog import Backlog, ReplyWriter, Write, check_batches
from ludus.env.grpc.call_server import CallServer
from ludus.env.grpc.call_stream import CallStream, ConnectionLostError
from ludus.env.messages.protobuf import call_session_id, fill_error
from ludus.env.sessions.interface import Connection
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import EnvError, ErrorCode, InvalidCallError
from ludus.services.gateway.sessions.sessions import GatewaySessions
from ludus.services.gateway.tenancy.callers import current_tenant
from ludus.services.gateway.tenancy.metrics import OK, GatewayMetrics
from ludus.services.gateway.tenancy.quotas import Quotas

_RELAYED_KINDS = frozenset({"step", "reset", "state", "call_tool"})


class CallRelay:
    """The relay for the Connect streams of one environment's clients."""

    def __init__(self, sessions: GatewaySessions, quotas: Quotas, metrics: GatewayMetrics) -> None:
        self._sessions = sessions
        self._calls = CallServer(sessions)
        self._quotas = quotas
        self._metrics = metrics
        self.begin_call, self.end_call = sessions.begin_call, sessions.end_call

    async def serve(
        self, batches: AsyncIterable[pb.CallBatch], write: Write, connection: Connection
    ) -> None:
        """Serve a client's stream until it ends, then release its sessions."""
        stream = _ClientStream(self, ReplyWriter(write), connection)
        try:
            await stream.serve(batches)
        finally:
            self._sessions.release(connection)

    def find_live_stream(
        self, kind: str, session_id: str, connection: Connection
    ) -> CallStream | None:
        """Return the live stream to the session's server, or None if a call must wait for it.

        Raises:
            EnvError: the id is not valid for this tenant and environment.
        """
        sessions = self._sessions
        route = sessions.route(session_id, for_tools=kind == "call_tool")
        if route.is_tools_only:
            return None  # the server knows the session by another id
        sessions.attach((session_id,), connection)
        link = sessions.fleet.find_link(route.server_id)
        return link.live_stream(route.server_id) if link is not None else None

    def count(self, kind: str, num_calls: int) -> None:
        """Count calls against the tenant's rate of steps.

        Raises:
            RateLimitError: the rate is too high.
        """
        try:
            self._quotas.count_steps(current_tenant(), num_calls)
        except EnvError as error:
            environment = self._sessions.environment
            self._metrics.count_calls(environment, kind, error.code, None, num_calls)
            raise

    def record_outcome(
        self, call: pb.Call, kind: str, outcome: pb.Reply | EnvError, duration_s: float
    ) -> None:
        """Record the outcome of a call in the metrics and for its session."""
        sessions, code = self._sessions, OK
        if isinstance(outcome, EnvError):
            code = outcome.code
            sessions.record_failure(getattr(call, kind).session_id, outcome)
        elif kind == "step":
            sessions.record_result(call.step.session_id, outcome.result)
        self._metrics.count_calls(sessions.environment, kind, code, duration_s)

    async def perform(self, call: pb.Call, kind: str | None, connection: Connection) -> pb.Reply:
        """Perform a call that may have to wait, and return its reply.

        Raises:
            EnvError: the call failed.
        """
        reply = pb.Reply()
        match kind:
            case "open":
                await self._calls.open(call.open, reply.open, connection)
            case "open_group":
                await self._calls.open_group(call.open_group, reply.open_group, connection)
            case "close":
                await self._sessions.close(call.close.session_id)
                reply.close.SetInParent()
            case "detach":
                await self._sessions.detach(call.detach.session_id, connection)
                reply.close.SetInParent()
            case "step" | "reset" | "state" | "call_tool":
                message = getattr(call, kind)
                reply = await self._sessions.call(
                    kind,
                    message.session_id,
                    call,
                    is_repeatable=_is_repeatable(call, kind),
                )
                if kind == "step":
                    self._sessions.record_result(message.session_id, reply.result)
            case _:
                raise InvalidCallError(
                    "expected one of open, open_group, reset, step, state, call_tool, detach,"
                    " close; got an empty call",
                    ErrorCode.UNKNOWN_TYPE,
                )
        return reply


class _ClientStream:
    """One client's stream: its running calls and its pending replies."""

    def __init__(self, relay: CallRelay, replies: ReplyWriter, connection: Connection) -> None:
        self._relay = relay
        self._replies = replies
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._backlog = Backlog()
        self._num_relayed = 0
        self._all_relayed = asyncio.Event()

    async def serve(self, batches: AsyncIterable[pb.CallBatch]) -> None:
        writing = asyncio.create_task(self._replies.write_forever())
        try:
            async for batch in check_batches(batches):
                for call in batch.calls:
                    await self._backlog.wait_for_room()
                    await self._replies.wait_for_room()
                    self._start_call(call)
            await self._wait_until_idle()
            await self._replies.flush()
        finally:
            writing.cancel()
            for task in self._tasks:
                task.cancel()

    async def _wait_until_idle(self) -> None:
        """Wait until every call has completed."""
        while self._num_relayed or self._tasks:
            if self._tasks:
                await asyncio.wait(self._tasks)
            if self._num_relayed:
                self._all_relayed.clear()
                await self._all_relayed.wait()

    def _start_call(self, call: pb.Call) -> None:
        kind = call.WhichOneof("call")
        if kind not in _RELAYED_KINDS:
            self._start_task(self._perform(call, kind))
            return
        message = getattr(call, kind)
        try:
            self._relay.count(kind, 1)
            stream = self._relay.find_live_stream(kind, message.session_id, self._connection)
            if stream is None:
                self._start_task(self._perform(call, kind))
                return
            future = stream.begin(lambda upstream: upstream.CopyFrom(call))
        except EnvError as error:
            self._refuse(call, message.session_id, error)
            return
        self._num_relayed += 1
        num_bytes = message.ByteSize()
        self._backlog.add(num_bytes)
        future.add_done_callback(lambda done: self._backlog.remove(num_bytes))
        self._relay.begin_call(message.session_id)
        future.add_done_callback(self._make_reply_callback(call, kind, message))

    def _make_reply_callback(
        self, call: pb.Call, kind: str, message: Any
    ) -> Callable[[asyncio.Future[pb.Reply]], None]:
        started_s = self._loop.time()

        def finish(done: asyncio.Future[pb.Reply]) -> None:
            self._num_relayed -= 1
            self._relay.end_call(message.session_id)
            if not self._num_relayed:
                self._all_relayed.set()
            if done.cancelled():
                return
            error = done.exception()
            if error is None:
                reply = done.result()
                self._relay.record_outcome(call, kind, reply, self._loop.time() - started_s)
                reply.call_id = call.call_id
                self._replies.put(reply)
            elif isinstance(error, ConnectionLostError) and _is_repeatable(call, kind):
                self._start_task(self._perform(call, kind))
            elif isinstance(error, EnvError):
                self._relay.record_outcome(call, kind, error, 0.0)
                self._refuse(call, message.session_id, error)

        return finish

    async def _perform(self, call: pb.Call, kind: str | None) -> None:
        num_bytes = call.ByteSize()
        self._backlog.add(num_bytes)
        try:
            reply = await self._relay.perform(call, kind, self._connection)
        except EnvError as error:
            self._refuse(call, call_session_id(call), error)
            return
        finally:
            self._backlog.remove(num_bytes)
        reply.call_id = call.call_id
        self._replies.put(reply)

    def _refuse(self, call: pb.Call, session_id: str, error: EnvError) -> None:
        reply = pb.Reply(call_id=call.call_id)
        fill_error(reply.error, error, session_id)
        self._replies.put(reply)

    def _start_task(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_repeatable(call: pb.Call, kind: str) -> bool:
    """Return whether a call may be sent twice, as numbered steps, resets and reads may."""
    if kind == "step":
        return bool(call.step.step_index)
    return kind in ("reset", "state")
