"""Passes the calls of a client's stream on to the streams of the servers.

    client stream --call--> server's stream      a future and a callback, no task, no re-encoding
    client stream <-reply-- server's stream

What that path cannot do becomes a task: opening and ending sessions, and calls that wait for
a server or for a connection that broke. A client waits for the answer to one call before it
makes the next one for the same session, so the two paths need no order between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any

from ludus.env.grpc.backlog import Backlog, ReplyWriter, Write, check_batches, check_num_calls
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
from ludus.services.gateway.wires.step_many import StepManyRelay

_PASSED_ON = frozenset({"step", "reset", "state", "call_tool"})


class CallRelay:
    """The Connect streams of one environment's clients."""

    def __init__(self, sessions: GatewaySessions, quotas: Quotas, metrics: GatewayMetrics) -> None:
        self._sessions = sessions
        self._calls = CallServer(sessions)
        self._step_many = StepManyRelay(sessions, metrics)
        self._quotas = quotas
        self._metrics = metrics
        self.call_begins, self.call_ends = sessions.call_begins, sessions.call_ends

    async def serve(
        self, batches: AsyncIterable[pb.CallBatch], write: Write, connection: Connection
    ) -> None:
        """Answer every call of the batches."""
        conversation = _Conversation(self, ReplyWriter(write), connection)
        try:
            await conversation.serve(batches)
        finally:
            self._sessions.release(connection)

    def stream_for(self, kind: str, session_id: str, connection: Connection) -> CallStream | None:
        """The live stream to the session's server; None where that takes a wait.

        Raises:
            EnvError: the id is none of this tenant's.
        """
        sessions = self._sessions
        route = sessions.route(session_id, for_tools=kind == "call_tool")
        if route.is_tools_only:
            return None  # its session is known to the server by another id
        sessions.attach((session_id,), connection)
        link = sessions.fleet.link_of(route.server_id)
        return link.live_stream(route.server_id) if link is not None else None

    def count(self, kind: str, num_calls: int) -> None:
        """Take calls from the tenant's rate of steps.

        Raises:
            RateLimitError: too fast.
        """
        try:
            self._quotas.stepping(current_tenant(), num_calls)
        except EnvError as error:
            environment = self._sessions.environment
            self._metrics.called(environment, kind, error.code, None, num_calls)
            raise

    def settled(
        self, call: pb.Call, kind: str, outcome: pb.Reply | EnvError, took_s: float
    ) -> None:
        """Note what an answer says of its session."""
        sessions, code = self._sessions, OK
        if isinstance(outcome, EnvError):
            code = outcome.code
            sessions.note_failure(getattr(call, kind).session_id, outcome)
        elif kind == "step":
            sessions.note_result(call.step.session_id, outcome.result)
        self._metrics.called(sessions.environment, kind, code, took_s)

    async def answer(self, call: pb.Call, kind: str | None, connection: Connection) -> pb.Reply:
        """The reply to a call that may have to wait.

        Raises:
            EnvError: what the reply is instead.
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
            case "step_many":
                check_num_calls("steps in one call", len(call.step_many.steps))
                self.count("step", len(call.step_many.steps))
                reply = await self._step_many.step_many(call, connection)
            case "step" | "reset" | "state" | "call_tool":
                message = getattr(call, kind)
                reply = await self._sessions.call(
                    kind,
                    message.session_id,
                    lambda upstream: upstream.CopyFrom(call),
                    is_repeatable=_is_repeatable(call, kind),
                )
                if kind == "step":
                    self._sessions.note_result(message.session_id, reply.result)
            case _:
                raise InvalidCallError(
                    "expected one of open, open_group, reset, step, step_many, state, call_tool,"
                    " detach, close; got an empty call",
                    ErrorCode.UNKNOWN_TYPE,
                )
        return reply


class _Conversation:
    """One client's stream: its calls on the way, and the replies that wait to be written."""

    def __init__(self, relay: CallRelay, replies: ReplyWriter, connection: Connection) -> None:
        self._relay = relay
        self._replies = replies
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._backlog = Backlog()
        self._num_on_the_way = 0
        self._all_back = asyncio.Event()

    async def serve(self, batches: AsyncIterable[pb.CallBatch]) -> None:
        writing = asyncio.create_task(self._replies.write_forever())
        try:
            async for batch in check_batches(batches):
                for call in batch.calls:
                    await self._backlog.wait_for_room()
                    await self._replies.wait_for_room()
                    self._begin(call)
            await self._drain()
            await self._replies.flush()
        finally:
            writing.cancel()
            for task in self._tasks:
                task.cancel()

    async def _drain(self) -> None:
        """Wait until every call is answered."""
        while self._num_on_the_way or self._tasks:
            if self._tasks:
                await asyncio.wait(self._tasks)
            if self._num_on_the_way:
                self._all_back.clear()
                await self._all_back.wait()

    def _begin(self, call: pb.Call) -> None:
        kind = call.WhichOneof("call")
        if kind not in _PASSED_ON:
            self._start(self._answer(call, kind))
            return
        message = getattr(call, kind)
        try:
            self._relay.count(kind, 1)
            stream = self._relay.stream_for(kind, message.session_id, self._connection)
            if stream is None:
                self._start(self._answer(call, kind))
                return
            future = stream.begin(lambda upstream: upstream.CopyFrom(call))
        except EnvError as error:
            self._refuse(call, message.session_id, error)
            return
        self._num_on_the_way += 1
        num_bytes = message.ByteSize()
        self._backlog.add(num_bytes)
        future.add_done_callback(lambda done: self._backlog.remove(num_bytes))
        self._relay.call_begins(message.session_id)
        future.add_done_callback(self._settler(call, kind, message))

    def _settler(
        self, call: pb.Call, kind: str, message: Any
    ) -> Callable[[asyncio.Future[pb.Reply]], None]:
        began_s = self._loop.time()

        def settle(done: asyncio.Future[pb.Reply]) -> None:
            self._num_on_the_way -= 1
            self._relay.call_ends(message.session_id)
            if not self._num_on_the_way:
                self._all_back.set()
            if done.cancelled():
                return
            error = done.exception()
            if error is None:
                reply = done.result()
                self._relay.settled(call, kind, reply, self._loop.time() - began_s)
                reply.call_id = call.call_id
                self._replies.put(reply)
            elif isinstance(error, ConnectionLostError) and _is_repeatable(call, kind):
                self._start(self._answer(call, kind))
            elif isinstance(error, EnvError):
                self._relay.settled(call, kind, error, 0.0)
                self._refuse(call, message.session_id, error)

        return settle

    async def _answer(self, call: pb.Call, kind: str | None) -> None:
        num_bytes = call.ByteSize()
        self._backlog.add(num_bytes)
        try:
            reply = await self._relay.answer(call, kind, self._connection)
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

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_repeatable(call: pb.Call, kind: str) -> bool:
    """True for calls that may be made twice: numbered steps, resets that nobody saw, reads."""
    if kind == "step":
        return bool(call.step.step_index) or call.step.HasField("reset")
    return kind in ("reset", "state")
