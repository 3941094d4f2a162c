"""The server of the call batches of env.proto on gRPC streams, based on `Sessions`.

Environments that step on the event loop answer a whole batch without waiting. For other
environments, each call is a separate task, and the finished replies share messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Iterable, Iterator

from ludus.env.encoding import EncodedResult
from ludus.env.grpc.backlog import (
    Backlog,
    ReadAhead,
    ReplyWriter,
    Write,
    check_batches,
)
from ludus.env.limits import MAX_BATCH_BYTES
from ludus.env.messages.protobuf import (
    call_session_id,
    fill_error,
    fill_opened,
    fill_result,
    read_action,
    read_object,
    read_open_args,
    read_reset_args,
)
from ludus.env.security.tracing import server_span
from ludus.env.sessions.interface import Connection, ImmediateCalls, Sessions
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import ErrorCode, InvalidCallError, to_env_error

MAX_GROUP_SIZE = 4096
_ENOUGH_REPLIES = 32
"""Number of replies that are sent without waiting for more replies, so that the client can take
its next steps while the server answers the other calls."""
TURN_S = 0.005
"""Maximum time for which the calls of one stream may occupy the event loop."""


class CallServer:
    """A server of every call of env.proto, which writes results directly into reply messages."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._immediate = sessions.immediate

    async def serve(
        self, batches: AsyncIterable[pb.CallBatch], write: Write, connection: Connection
    ) -> None:
        """Answer every call of the batches, and release the connection's sessions at the end."""
        try:
            if self._immediate is not None:
                await self._serve_in_order(self._immediate, batches, write, connection)
            else:
                await self._serve_concurrently(batches, write, connection)
        finally:
            self._sessions.release(connection)

    async def open(
        self, request: pb.OpenRequest, response: pb.OpenResponse, connection: Connection | None
    ) -> None:
        """Open a session."""
        fill_opened(response, await self._sessions.open(read_open_args(request), connection))

    async def open_group(
        self,
        request: pb.OpenGroupRequest,
        response: pb.OpenGroupResponse,
        connection: Connection | None,
    ) -> None:
        """Open a group of sessions."""
        size = len(request.session_ids) or request.size
        if not 1 <= size <= MAX_GROUP_SIZE:
            raise InvalidCallError(f"a group must have 1 to {MAX_GROUP_SIZE} sessions, got {size}")
        args = read_open_args(request.open)
        ids = list(request.session_ids)
        for opened_session in await self._sessions.open_group(args, size, connection, ids):
            fill_opened(response.sessions.add(), opened_session)

    async def _reset(self, request: pb.ResetRequest, response: pb.StepResult) -> None:
        args = read_reset_args(request.args)
        fill_result(
            response, request.session_id, await self._sessions.reset(request.session_id, args)
        )

    async def _step(self, request: pb.StepRequest, response: pb.StepResult) -> None:
        session_id = request.session_id
        result = await self._sessions.step(
            session_id, read_action(request), request.step_index, request.timeout_s
        )
        fill_result(response, session_id, result)

    async def _state(self, request: pb.StateRequest, response: pb.StateResponse) -> None:
        response.state_json = await self._sessions.state(request.session_id)
        response.session_id = request.session_id

    async def _call_tool(self, request: pb.CallToolRequest, response: pb.CallToolResponse) -> None:
        arguments = read_object(request.arguments_json, "arguments_json")
        response.result_json = await self._sessions.call_tool(
            request.session_id, request.name, arguments
        )
        response.session_id = request.session_id

    # -- streams -----------------------------------------------------------------------

    async def _serve_in_order(
        self,
        immediate: ImmediateCalls,
        batches: AsyncIterable[pb.CallBatch],
        write: Write,
        connection: Connection,
    ) -> None:
        ahead = ReadAhead(batches)
        reading = asyncio.create_task(ahead.read())
        try:
            while calls := await ahead.take(gathers=len(connection.session_ids) > 1):
                await self._answer_in_order(immediate, calls, write, connection)
            await reading
        finally:
            reading.cancel()

    async def _answer_in_order(
        self,
        immediate: ImmediateCalls,
        calls: list[pb.Call],
        write: Write,
        connection: Connection,
    ) -> None:
        response, num_bytes, num_replies = pb.ReplyBatch(), 0, 0
        self._sessions.attach(called_sessions(calls), connection)
        turn = _Turn()
        for call in calls:
            if turn.is_over():
                await turn.next()
            if num_bytes > MAX_BATCH_BYTES or num_replies >= _ENOUGH_REPLIES:
                await write(response)
                response, num_bytes, num_replies = pb.ReplyBatch(), 0, 0
            reply = response.replies.add()
            reply.call_id = call.call_id
            if call.HasField("step") and not call.HasField("trace"):
                result = _step_now(immediate, call.step, reply)
                num_bytes += reply.ByteSize() if result is None else result.num_bytes
            else:
                await self._answer(call, reply, connection)
                num_bytes += reply.ByteSize()
            num_replies += 1
        await write(response)

    async def _serve_concurrently(
        self, batches: AsyncIterable[pb.CallBatch], write: Write, connection: Connection
    ) -> None:
        replies, backlog = ReplyWriter(write), Backlog()
        tasks: set[asyncio.Task[None]] = set()
        writing = asyncio.create_task(replies.write_forever())
        try:
            async for batch in check_batches(batches):
                self._sessions.attach(called_sessions(batch.calls), connection)
                for call in batch.calls:
                    await backlog.wait_for_room()
                    await replies.wait_for_room()
                    answering = self.answer_into(call, replies, backlog, connection)
                    task = asyncio.create_task(answering)
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            if tasks:
                await asyncio.wait(tasks)
            await replies.flush()
        finally:
            writing.cancel()
            for task in tasks:
                task.cancel()

    async def answer_into(
        self, call: pb.Call, replies: ReplyWriter, backlog: Backlog, connection: Connection
    ) -> None:
        """Answer a call, and put the reply."""
        num_bytes, reply = call.ByteSize(), pb.Reply(call_id=call.call_id)
        backlog.add(num_bytes)
        try:
            await self._answer(call, reply, connection)
            replies.put(reply)
        finally:
            backlog.remove(num_bytes)

    async def _answer(self, call: pb.Call, reply: pb.Reply, connection: Connection) -> None:
        if call.HasField("trace"):
            name = f"ludus.env/{call.WhichOneof('call')}"
            with server_span(name, call.trace.traceparent, call.trace.request_id):
                await self._answer_untraced(call, reply, connection)
        else:
            await self._answer_untraced(call, reply, connection)

    async def _answer_untraced(
        self, call: pb.Call, reply: pb.Reply, connection: Connection
    ) -> None:
        try:
            match call.WhichOneof("call"):
                case "step":
                    await self._step(call.step, reply.result)
                case "open":
                    await self.open(call.open, reply.open, connection)
                case "open_group":
                    await self.open_group(call.open_group, reply.open_group, connection)
                case "reset":
                    await self._reset(call.reset, reply.result)
                case "state":
                    await self._state(call.state, reply.state)
                case "call_tool":
                    await self._call_tool(call.call_tool, reply.call_tool)
                case "close" | "detach":
                    await self._end(call, reply, connection)
                case _:
                    raise InvalidCallError(
                        "expected one of open, open_group, reset, step, state,"
                        " call_tool, detach, close; got an empty call",
                        ErrorCode.UNKNOWN_TYPE,
                    )
        except Exception as error:  # noqa: BLE001 - one call's failure must not end the stream
            fill_failure(reply, error, call_session_id(call))

    async def _end(self, call: pb.Call, reply: pb.Reply, connection: Connection) -> None:
        if call.HasField("close"):
            await self._sessions.close(call.close.session_id)
        else:
            await self._sessions.detach(call.detach.session_id, connection)
        reply.close.SetInParent()


def _step_now(
    immediate: ImmediateCalls, request: pb.StepRequest, reply: pb.Reply
) -> EncodedResult | None:
    """Take a step, write it into the reply, and return the result, or None after an error."""
    session_id = request.session_id
    try:
        is_plain = request.WhichOneof("action") == "action_json" and not request.tensors
        action = request.action_json if is_plain else read_action(request)
        result = immediate.step_now(session_id, action, request.step_index)
        fill_result(reply.result, session_id, result)
    except Exception as error:  # noqa: BLE001 - one step's failure must not end the stream
        fill_failure(reply, error, session_id)
        return None
    return result


class _Turn:
    """A limited stretch of work, after which the event loop can run other tasks."""

    def __init__(self) -> None:
        self._ends_s = time.monotonic() + TURN_S

    def is_over(self) -> bool:
        """Return True after the time limit."""
        return time.monotonic() >= self._ends_s

    async def next(self) -> None:
        """Let other tasks run, and start the next turn."""
        await asyncio.sleep(0)
        self._ends_s = time.monotonic() + TURN_S


def fill_failure(reply: pb.Reply, error: Exception, session_id: str) -> None:
    """Write an error into a reply, which replaces an incomplete result."""
    fill_error(reply.error, to_env_error(error), session_id)


def called_sessions(calls: Iterable[pb.Call]) -> Iterator[str]:
    """Yield the ids of existing sessions that the calls use, without those they detach from."""
    for call in calls:
        kind = call.WhichOneof("call")
        if kind == "step":
            yield call.step.session_id
        elif kind not in ("open", "detach"):
            yield call_session_id(call)
