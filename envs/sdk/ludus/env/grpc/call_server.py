"""The gRPC wire of a server, which serves env.proto from `Sessions`.

If environments step on the event loop, a whole batch is answered without waiting. Otherwise, each
call is a separate task, and replies that are ready at the same time share a message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ludus.env.encoding import EncodedResult
from ludus.env.grpc.backlog import Backlog, CallReader, ReplyWriter, WriteBatch
from ludus.env.limits import MAX_BATCH_BYTES, MAX_CALL_FIELDS, MAX_CALLS_PER_MESSAGE
from ludus.env.messages.protobuf import (
    CONNECTED_KEY,
    fill_error,
    fill_open_result,
    fill_result,
    fill_tool_result,
    get_call_session_id,
    make_description_message,
    read_action,
    read_json_object,
    read_open_args,
    read_reset_args,
)
from ludus.env.messages.status import STATUSES_BY_CODE
from ludus.env.messages.wire_format import check_num_fields
from ludus.env.security.tokens import MISSING_TOKEN, REVOKED_TOKEN, AcceptedTokens
from ludus.env.security.tracing import open_server_span
from ludus.env.sessions.interface import Connection, ImmediateCalls, Load, Sessions
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import EnvError, ErrorCode, InvalidCallError, to_env_error

Context: TypeAlias = grpc.aio.ServicerContext

MAX_GROUP_SIZE = 4096
_NUM_SUFFICIENT_REPLIES = 32
"""Number of replies after which a message is sent, so that the client can take its next steps while
the server answers the other calls."""
MAX_TURN_S = 0.005
"""Maximum time for which the calls of one stream may occupy the event loop."""


class CallServer:
    """A server of all calls of env.proto. It writes results directly into reply messages."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._immediate_calls = sessions.immediate_calls
        self._methods = {
            "open": self._answer_open,
            "open_group": self._answer_group,
            "reset": self._answer_reset,
            "step": self._answer_step,
            "state": self._answer_state,
            "call_tool": self._answer_tool,
            "detach": self._answer_detach,
            "close": self._answer_close,
        }

    async def serve(
        self, batches: AsyncIterable[pb.CallBatch], write: WriteBatch, connection: Connection
    ) -> None:
        """Answer every call of the batches, and release the connection's sessions at the end."""
        try:
            if self._immediate_calls is not None:
                await self._serve_in_order(self._immediate_calls, batches, write, connection)
            else:
                await self._serve_concurrently(batches, write, connection)
        finally:
            self._sessions.release(connection)

    # -- calls -------------------------------------------------------------------------

    async def _answer_open(self, call: pb.Call, reply: pb.Reply, connection: Connection) -> None:
        args = read_open_args(call.open)
        fill_open_result(reply.open, await self._sessions.open(args, connection))

    async def _answer_group(self, call: pb.Call, reply: pb.Reply, connection: Connection) -> None:
        open_request = call.open_group
        size = len(open_request.session_ids) or open_request.size
        if not 1 <= size <= MAX_GROUP_SIZE:
            raise InvalidCallError(f"a group must have 1 to {MAX_GROUP_SIZE} sessions, got {size}")
        args = read_open_args(open_request.open)
        session_ids = list(open_request.session_ids)
        for open_result in await self._sessions.open_group(args, size, connection, session_ids):
            fill_open_result(reply.open_group.sessions.add(), open_result)

    async def _answer_reset(self, call: pb.Call, reply: pb.Reply, connection: Connection) -> None:
        session_id, args = call.reset.session_id, read_reset_args(call.reset.args)
        fill_result(reply.result, session_id, await self._sessions.reset(session_id, args))

    async def _answer_step(self, call: pb.Call, reply: pb.Reply, connection: Connection) -> None:
        step_request = call.step
        result = await self._sessions.step(
            step_request.session_id,
            read_action(step_request),
            step_request.step_index,
            step_request.timeout_s,
            step_request.attempt_id,
        )
        fill_result(reply.result, step_request.session_id, result)

    async def _answer_state(self, call: pb.Call, reply: pb.Reply, connection: Connection) -> None:
        reply.state.state_json = await self._sessions.state(call.state.session_id)
        reply.state.session_id = call.state.session_id

    async def _answer_tool(self, call: pb.Call, reply: pb.Reply, connection: Connection) -> None:
        request = call.call_tool
        arguments = read_json_object(request.arguments_json, "arguments_json")
        result = await self._sessions.call_tool(request.session_id, request.name, arguments)
        fill_tool_result(reply.call_tool, request.session_id, result)

    async def _answer_detach(self, call: pb.Call, reply: pb.Reply, connection: Connection) -> None:
        await self._sessions.detach(call.detach.session_id, connection)
        reply.close.SetInParent()

    async def _answer_close(self, call: pb.Call, reply: pb.Reply, connection: Connection) -> None:
        await self._sessions.close(call.close.session_id)
        reply.close.SetInParent()

    # -- streams -----------------------------------------------------------------------

    async def _serve_in_order(
        self,
        immediate_calls: ImmediateCalls,
        batches: AsyncIterable[pb.CallBatch],
        write: WriteBatch,
        connection: Connection,
    ) -> None:
        reader = CallReader(batches)
        read_task = asyncio.create_task(reader.read())
        try:
            while calls := await reader.take_calls(waits_for_more=len(connection.session_ids) > 1):
                await self._answer_in_order(immediate_calls, calls, write, connection)
            await read_task
        finally:
            read_task.cancel()

    async def _answer_in_order(
        self,
        immediate_calls: ImmediateCalls,
        calls: list[pb.Call],
        write: WriteBatch,
        connection: Connection,
    ) -> None:
        reply_batch, num_bytes, num_replies = pb.ReplyBatch(), 0, 0
        self._sessions.attach(find_called_sessions(calls), connection)
        turn_end_s = time.monotonic() + MAX_TURN_S
        for call in calls:
            if time.monotonic() >= turn_end_s:
                await asyncio.sleep(0)  # other tasks run
                turn_end_s = time.monotonic() + MAX_TURN_S
            if num_bytes > MAX_BATCH_BYTES or num_replies >= _NUM_SUFFICIENT_REPLIES:
                await write(reply_batch)
                reply_batch, num_bytes, num_replies = pb.ReplyBatch(), 0, 0
            reply = reply_batch.replies.add()
            reply.call_id = call.call_id
            if call.HasField("step") and not call.HasField("trace"):
                result = _step_now(immediate_calls, call.step, reply)
                num_bytes += reply.ByteSize() if result is None else result.num_bytes
            else:
                await self._answer(call, reply, connection)
                num_bytes += reply.ByteSize()
            num_replies += 1
        await write(reply_batch)

    async def _serve_concurrently(
        self, batches: AsyncIterable[pb.CallBatch], write: WriteBatch, connection: Connection
    ) -> None:
        reply_writer, backlog = ReplyWriter(write), Backlog()
        tasks: set[asyncio.Task[None]] = set()
        write_task = asyncio.create_task(reply_writer.write_forever())
        try:
            async for batch in batches:
                self._sessions.attach(find_called_sessions(batch.calls), connection)
                for call in batch.calls:
                    await backlog.wait_for_room()
                    await reply_writer.wait_for_room()
                    answer_call = self.answer_and_queue(call, reply_writer, backlog, connection)
                    task = asyncio.create_task(answer_call)
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            if tasks:
                await asyncio.wait(tasks)
            await reply_writer.flush()
        finally:
            write_task.cancel()
            for task in tasks:
                task.cancel()

    async def answer_and_queue(
        self, call: pb.Call, reply_writer: ReplyWriter, backlog: Backlog, connection: Connection
    ) -> None:
        """Answer a call, and queue the reply."""
        num_bytes, reply = call.ByteSize(), pb.Reply(call_id=call.call_id)
        backlog.add(num_bytes)
        try:
            await self._answer(call, reply, connection)
            reply_writer.put(reply)
        finally:
            backlog.remove(num_bytes)

    async def _answer(self, call: pb.Call, reply: pb.Reply, connection: Connection) -> None:
        name, trace = f"ludus.env/{call.WhichOneof('call')}", call.trace
        with open_server_span(name, trace.traceparent, trace.request_id):
            try:
                method = self._methods.get(call.WhichOneof("call"))
                if method is None:
                    raise InvalidCallError(
                        f"expected one of {', '.join(self._methods)}; got an empty call",
                        ErrorCode.UNKNOWN_TYPE,
                    )
                await method(call, reply, connection)
            except Exception as error:  # noqa: BLE001 - one call's failure must not end the stream
                fill_error(reply.error, to_env_error(error), get_call_session_id(call))


def _step_now(
    immediate_calls: ImmediateCalls, request: pb.StepRequest, reply: pb.Reply
) -> EncodedResult | None:
    """Take a step, write it into the reply, and return the result, or None after an error."""
    session_id = request.session_id
    try:
        result = immediate_calls.step_now(
            session_id, read_action(request), request.step_index, request.attempt_id
        )
        fill_result(reply.result, session_id, result)
    except Exception as error:  # noqa: BLE001 - one step's failure must not end the stream
        fill_error(reply.error, to_env_error(error), session_id)
        return None
    return result


def find_called_sessions(calls: Iterable[pb.Call]) -> Iterator[str]:
    """Yield the ids of the sessions that the calls use, except new and detached sessions."""
    for call in calls:
        call_field = call.WhichOneof("call")
        if call_field == "step":
            yield call.step.session_id
        elif call_field not in ("open", "detach"):
            yield get_call_session_id(call)


class EnvServicer(env_pb2_grpc.EnvServiceServicer):
    """The EnvService of env.proto, served from one `Sessions`."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._call_server = CallServer(sessions)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        return make_description_message(self._sessions.description)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        return make_status_message(self._sessions.description.server_id, self._sessions.load)

    async def Connect(self, request_iterator: Any, context: Context) -> None:
        await context.send_initial_metadata(((CONNECTED_KEY, "1"),))
        try:
            batches = parse_batches(request_iterator)
            await self._call_server.serve(batches, context.write, Connection())
        except EnvError as error:
            await abort_call(context, error)


class UnparsedStreamInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """An interceptor that leaves the messages of streams unparsed, for `parse_batches`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return the handler without its request parser."""
        handler = await continuation(handler_call_details)
        if handler is None or not (handler.request_streaming and handler.response_streaming):
            return handler
        return grpc.stream_stream_rpc_method_handler(
            handler.stream_stream, None, handler.response_serializer
        )


async def parse_batches(stream: AsyncIterable[bytes | pb.CallBatch]) -> AsyncIterator[pb.CallBatch]:
    """Yield the batches of calls in a stream, and parse the messages that are still bytes.

    Raises:
        InvalidCallError: a message is malformed, or has too many fields or too many
            calls. The error ends the stream.
    """
    async for message in stream:
        batch = message if isinstance(message, pb.CallBatch) else _parse_batch(message)
        if len(batch.calls) > MAX_CALLS_PER_MESSAGE:
            raise InvalidCallError(
                f"expected at most {MAX_CALLS_PER_MESSAGE} calls in one message, got"
                f" {len(batch.calls)}; send them in several messages"
            )
        yield batch


def _parse_batch(message: bytes) -> pb.CallBatch:
    try:
        check_num_fields(pb.CallBatch, message, MAX_CALL_FIELDS)
        batch: pb.CallBatch = pb.CallBatch.FromString(message)
    except (ValueError, DecodeError) as error:
        raise InvalidCallError(f"expected a batch of calls: {error}") from None
    return batch


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """An interceptor that refuses calls without `authorization: Bearer <token>`.

    A stream ends when its token is no longer valid.
    """

    def __init__(self, tokens: AcceptedTokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return the handler, or a handler of the same kind that refuses the call."""
        handler = await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        authorization = metadata.get("authorization", "")
        if handler is None:
            return handler
        is_authorized = self._tokens.is_authorized(authorization)
        if not handler.request_streaming:
            if is_authorized:
                return handler
            return grpc.unary_unary_rpc_method_handler(_refuse_call)
        if not is_authorized:
            return grpc.stream_stream_rpc_method_handler(_refuse_call)

        async def serve(requests: Any, context: Context) -> None:
            await self._serve_while_authorized(
                authorization, handler.stream_stream(requests, context), context
            )

        return grpc.stream_stream_rpc_method_handler(
            serve, handler.request_deserializer, handler.response_serializer
        )

    async def _serve_while_authorized(
        self, authorization: str, work: Awaitable[None], context: Context
    ) -> None:
        serve_task = asyncio.ensure_future(work)
        is_revoked = False

        def revoke() -> None:
            nonlocal is_revoked
            is_revoked = True
            serve_task.cancel()

        with self._tokens.track_connection(authorization, revoke):
            try:
                await serve_task
            except asyncio.CancelledError:
                if not is_revoked:
                    raise
        if is_revoked:
            await abort_call(context, EnvError(REVOKED_TOKEN, ErrorCode.UNAUTHENTICATED))


async def _refuse_call(request: Any, context: Context) -> NoReturn:
    await abort_call(context, EnvError(MISSING_TOKEN, ErrorCode.UNAUTHENTICATED))


def make_status_message(server_id: str, load: Load) -> pb.StatusResponse:
    """Return the message for a server's load."""
    return pb.StatusResponse(server_id=server_id, **asdict(load))


async def abort_call(context: Context, error: EnvError) -> NoReturn:
    """End the rpc with the error's status, and send the code and retry-after as metadata."""
    status = STATUSES_BY_CODE[error.code].grpc_status
    metadata = [("ludus-code", str(error.code))]
    if error.retry_after_s > 0:
        metadata.append(("retry-after-ms", str(round(error.retry_after_s * 1000))))
    await context.abort(status, error.message, tuple(metadata))
    raise AssertionError("context.abort always raises")
