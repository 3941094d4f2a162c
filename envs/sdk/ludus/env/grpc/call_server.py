"""Answers call batches of env.proto from `Sessions`, for gRPC streams.

Environments that step on the event loop answer a whole batch at once; for the others each
call is a task of its own and finished replies travel together as soon as the stream can
take them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator
from typing import TypeAlias

from ludus.env.encoding import EncodedResult, ResetArgs
from ludus.env.limits import MAX_BATCH_BYTES
from ludus.env.messages.protobuf import (
    fill_error,
    fill_opened,
    fill_result,
    read_action,
    read_object,
    read_open_args,
    read_reset_args,
    session_of,
)
from ludus.env.security.tracing import server_span
from ludus.env.sessions.failures import as_env_error
from ludus.env.sessions.interface import Connection, ImmediateCalls, Sessions
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import ErrorCode, InvalidCallError

Write: TypeAlias = Callable[[pb.ReplyBatch], Awaitable[None]]
MAX_GROUP_SIZE = 4096
MAX_CALLS_AHEAD = 4096
"""Calls that are read before an earlier one is answered."""
_ENOUGH_CALLS = 16
_ENOUGH_ANSWERS = 32
"""They travel without waiting for those after them: the client takes its next steps with these
while the server works on the others."""
_NUM_IDLE_TURNS = 8
"""Turns of the event loop, a few microseconds each, in which nothing more comes."""


class CallServer:
    """Every call of env.proto, answered in place into its reply message."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._immediate = sessions.immediate

    async def serve(
        self, batches: AsyncIterable[pb.CallBatch], write: Write, connection: Connection
    ) -> None:
        """Answer every call of the batches."""
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
        """Open a group."""
        size = len(request.session_ids) or request.size
        if not 1 <= size <= MAX_GROUP_SIZE:
            raise InvalidCallError(
                f"expected a group of 1 to {MAX_GROUP_SIZE} sessions, got {size}"
            )
        args = read_open_args(request.open)
        ids = list(request.session_ids)
        for one in await self._sessions.open_group(args, size, connection, ids):
            fill_opened(response.sessions.add(), one)

    async def _reset(self, request: pb.ResetRequest, response: pb.StepResult) -> None:
        """Start an episode."""
        args = read_reset_args(request.args)
        fill_result(
            response, request.session_id, await self._sessions.reset(request.session_id, args)
        )

    async def _step(self, request: pb.StepRequest, response: pb.StepResult) -> None:
        """Take a step, or start the next episode where the request says so."""
        session_id = request.session_id
        if request.HasField("reset"):
            args: ResetArgs = read_reset_args(request.reset)
            result = await self._sessions.reset(session_id, args)
        else:
            result = await self._sessions.step(
                session_id, read_action(request), request.step_index, request.timeout_s
            )
        fill_result(response, session_id, result)

    async def _state(self, request: pb.StateRequest, response: pb.StateResponse) -> None:
        """Read the state."""
        response.state_json = await self._sessions.state(request.session_id)
        response.session_id = request.session_id

    async def _call_tool(self, request: pb.CallToolRequest, response: pb.CallToolResponse) -> None:
        """Call a tool."""
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
        ahead = _ReadAhead(batches)
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
        response, num_bytes, num_answers = pb.ReplyBatch(), 0, 0
        self._sessions.attach(sessions_called(calls), connection)
        for call in calls:
            if num_bytes > MAX_BATCH_BYTES or num_answers >= _ENOUGH_ANSWERS:
                await write(response)
                response, num_bytes, num_answers = pb.ReplyBatch(), 0, 0
            reply = response.replies.add()
            reply.call_id = call.call_id
            if call.HasField("step") and not call.HasField("trace"):
                result = _step_now(immediate, call.step, reply)
                num_bytes += reply.ByteSize() if result is None else result.num_bytes
            elif call.HasField("step_many") and not call.HasField("trace"):
                add_reply = reply.step_many.replies.add
                for step in call.step_many.steps:
                    _step_now(immediate, step, add_reply())
                num_bytes += reply.ByteSize()
                num_answers += len(call.step_many.steps)
            else:
                await self._answer(call, reply, connection)
                num_bytes += reply.ByteSize()
            num_answers += 1
        await write(response)

    async def _serve_concurrently(
        self, batches: AsyncIterable[pb.CallBatch], write: Write, connection: Connection
    ) -> None:
        replies = ReplyWriter(write)
        tasks: set[asyncio.Task[None]] = set()
        writing = asyncio.create_task(replies.write_forever())
        try:
            async for batch in batches:
                self._sessions.attach(sessions_called(batch.calls), connection)
                for call in batch.calls:
                    task = asyncio.create_task(self._answer_into(call, replies, connection))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            if tasks:
                await asyncio.wait(tasks)
            await replies.flush()
        finally:
            writing.cancel()
            for task in tasks:
                task.cancel()

    async def _answer_into(
        self, call: pb.Call, replies: ReplyWriter, connection: Connection
    ) -> None:
        reply = pb.Reply(call_id=call.call_id)
        await self._answer(call, reply, connection)
        replies.put(reply)

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
                case "step_many":
                    await self._step_many(call.step_many, reply.step_many)
                case "close" | "detach":
                    await self._end(call, reply, connection)
                case _:
                    raise InvalidCallError(
                        "expected one of open, open_group, reset, step, step_many, state,"
                        " call_tool, detach, close; got an empty call",
                        ErrorCode.UNKNOWN_TYPE,
                    )
        except Exception as error:  # noqa: BLE001 - one call's failure must not end the stream
            fill_failure(reply, error, session_of(call))

    async def _end(self, call: pb.Call, reply: pb.Reply, connection: Connection) -> None:
        if call.HasField("close"):
            await self._sessions.close(call.close.session_id)
        else:
            await self._sessions.detach(call.detach.session_id, connection)
        reply.close.SetInParent()

    async def _step_many(self, request: pb.StepManyRequest, response: pb.StepManyResponse) -> None:
        steps = [self._step_or_error(step, response.replies.add()) for step in request.steps]
        await asyncio.gather(*steps)

    async def _step_or_error(self, request: pb.StepRequest, reply: pb.StepReply) -> None:
        try:
            await self._step(request, reply.result)
        except Exception as error:  # noqa: BLE001 - one step's failure must not end the stream
            fill_failure(reply, error, request.session_id)


def _step_now(
    immediate: ImmediateCalls, request: pb.StepRequest, reply: pb.Reply | pb.StepReply
) -> EncodedResult | None:
    """What the reply is filled with; None where that is an error."""
    session_id, kind = request.session_id, request.WhichOneof("action")
    try:
        if kind == "reset":
            result = immediate.reset_now(session_id, read_reset_args(request.reset))
        else:
            is_plain = kind == "action_json" and not request.tensors
            action = request.action_json if is_plain else read_action(request)
            result = immediate.step_now(session_id, action, request.step_index)
        fill_result(reply.result, session_id, result)
    except Exception as error:  # noqa: BLE001 - one step's failure must not end the stream
        fill_failure(reply, error, session_id)
        return None
    return result


def fill_failure(reply: pb.Reply | pb.StepReply, error: Exception, session_id: str) -> None:
    """Let a reply say what went wrong, in the place of whatever it was half filled with."""
    fill_error(reply.error, as_env_error(error), session_id)


def sessions_called(calls: Iterable[pb.Call]) -> Iterator[str]:
    """The ids of the sessions that exist already and are called, not to let go of them."""
    for call in calls:
        kind = call.WhichOneof("call")
        if kind == "step":
            yield call.step.session_id
        elif kind == "step_many":
            yield from (step.session_id for step in call.step_many.steps)
        elif kind not in ("open", "detach"):
            yield session_of(call)


class _ReadAhead:
    """Reads calls while earlier ones are answered, so that their replies travel together.

    A message costs far more than a call in it. Clients that send one call per message would
    otherwise be answered one by one, and pay as much again for their replies.
    """

    def __init__(self, batches: AsyncIterable[pb.CallBatch]) -> None:
        self._batches = batches
        self._waiting: list[pb.Call] = []
        self._has_ended = False
        self._came = asyncio.Event()
        self._taken = asyncio.Event()

    async def read(self) -> None:
        """Read until the batches end; raises what reading raises."""
        try:
            async for batch in self._batches:
                self._waiting.extend(batch.calls)
                self._came.set()
                if len(self._waiting) >= MAX_CALLS_AHEAD:
                    self._taken.clear()
                    await self._taken.wait()
        finally:
            self._has_ended = True
            self._came.set()

    async def take(self, *, gathers: bool) -> list[pb.Call]:
        """The calls that have come since, at least one; none when they have ended.

        Args:
            gathers: holds a few calls back for as long as more keep coming.
        """
        while not self._waiting and not self._has_ended:
            self._came.clear()
            await self._came.wait()
        if gathers:
            await self._gather()
        taken, self._waiting = self._waiting, []
        self._taken.set()
        return taken

    async def _gather(self) -> None:
        if self._waiting and self._waiting[-1].HasField("step_many"):
            return  # who calls so has gathered already
        num_idle_turns, num_calls = 0, len(self._waiting)
        while num_calls < _ENOUGH_CALLS and num_idle_turns < _NUM_IDLE_TURNS:
            await asyncio.sleep(0)
            num_idle_turns = num_idle_turns + 1 if len(self._waiting) == num_calls else 0
            num_calls = len(self._waiting)


class ReplyWriter:
    """Gathers replies and writes them in batches; the first waiting reply wakes the writer."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: list[pb.Reply] = []
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()

    def put(self, reply: pb.Reply) -> None:
        """Queue a reply."""
        self._waiting.append(reply)
        self._wake.set()

    async def write_forever(self) -> None:
        """Write what is put, until cancelled."""
        while True:
            await self._wake.wait()
            await self.flush()

    async def flush(self) -> None:
        """Write everything that was put."""
        async with self._writing:
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            batch, num_bytes = pb.ReplyBatch(), 0
            for reply in waiting:
                batch.replies.append(reply)
                num_bytes += reply.ByteSize()
                if num_bytes > MAX_BATCH_BYTES:
                    await self._write(batch)
                    batch, num_bytes = pb.ReplyBatch(), 0
            if batch.replies:
                await self._write(batch)
