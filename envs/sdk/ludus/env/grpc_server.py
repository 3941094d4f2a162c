"""The gRPC face of a server: env.proto over a SessionCore.

Connect consumes call batches and produces reply batches. Environments that step on the
event loop answer a whole batch at once; for the others each call is a task of its own and
finished replies travel together as soon as the stream can take them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc

from ludus.env.authentication import MISSING_TOKEN, is_authorized
from ludus.env.core import SessionCore
from ludus.env.encoding import ResetArgs
from ludus.env.grpc_messages import (
    CONNECTED_KEY,
    MAX_BATCH_BYTES,
    describe_message,
    fill_error,
    fill_result,
    read_action,
    read_reset_args,
)
from ludus.env.session import Owner
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import EnvError, ErrorCode, InvalidCallError

ResultT = TypeVar("ResultT")
Context: TypeAlias = grpc.aio.ServicerContext

_STATUS_OF_CODE = {
    ErrorCode.INVALID_JSON: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNKNOWN_TYPE: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.VALIDATION_ERROR: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.EXECUTION_ERROR: grpc.StatusCode.UNKNOWN,
    ErrorCode.FACTORY_ERROR: grpc.StatusCode.UNKNOWN,
    ErrorCode.CAPACITY_REACHED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.SESSION_ERROR: grpc.StatusCode.NOT_FOUND,
    ErrorCode.SESSION_LOST: grpc.StatusCode.NOT_FOUND,
    ErrorCode.ILLEGAL_ACTION: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.ACTION_PARSE_ERROR: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.NOT_RESET: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.EPISODE_OVER: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.STEP_CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
}


class EnvServicer(env_pb2_grpc.EnvServiceServicer):
    """Every rpc of env.proto, served from one SessionCore."""

    def __init__(self, core: SessionCore) -> None:
        self._core = core

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        return describe_message(self._core.description)

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenResponse:
        response = pb.OpenResponse()
        await _or_abort(context, self._open(request, response, None))
        return response

    async def Reset(self, request: pb.ResetRequest, context: Context) -> pb.StepResult:
        response = pb.StepResult()
        await _or_abort(context, self._reset(request, response))
        return response

    async def Step(self, request: pb.StepRequest, context: Context) -> pb.StepResult:
        response = pb.StepResult()
        await _or_abort(context, self._step(request, response))
        return response

    async def State(self, request: pb.StateRequest, context: Context) -> pb.StateResponse:
        state_json = await _or_abort(context, self._core.state(request.session_id))
        return pb.StateResponse(session_id=request.session_id, state_json=state_json)

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseResponse:
        await self._core.close(request.session_id)
        return pb.CloseResponse()

    async def StepMany(self, request: pb.StepManyRequest, context: Context) -> pb.StepManyResponse:
        response = pb.StepManyResponse()
        replies = [(step, response.replies.add()) for step in request.steps]
        if self._core.runs_inline:
            for step, reply in replies:
                self._step_now(step, reply)
        else:
            await asyncio.gather(*(self._step_or_error(step, reply) for step, reply in replies))
        return response

    async def Connect(self, request_iterator: Any, context: Context) -> None:
        await context.send_initial_metadata(((CONNECTED_KEY, "1"),))
        owner = Owner()
        try:
            if self._core.runs_inline:
                await self._connect_inline(request_iterator, context, owner)
            else:
                await self._connect_threaded(request_iterator, context, owner)
        finally:
            self._core.close_owned(owner)

    async def _connect_inline(self, request_iterator: Any, context: Context, owner: Owner) -> None:
        async for batch in request_iterator:
            response = pb.ReplyBatch()
            num_bytes = 0
            for call in batch.calls:
                if num_bytes > MAX_BATCH_BYTES:
                    await context.write(response)
                    response, num_bytes = pb.ReplyBatch(), 0
                reply = response.replies.add()
                reply.call_id = call.call_id
                if call.HasField("step"):
                    num_bytes += self._step_now(call.step, reply)
                else:
                    await self._serve(call, reply, owner)
                    num_bytes += reply.ByteSize()
            await context.write(response)

    async def _connect_threaded(
        self, request_iterator: Any, context: Context, owner: Owner
    ) -> None:
        replies = _ReplyWriter(context)
        tasks: set[asyncio.Task[None]] = set()
        writing = asyncio.create_task(replies.write_forever())
        try:
            async for batch in request_iterator:
                for call in batch.calls:
                    task = asyncio.create_task(self._serve_into(call, replies, owner))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            if tasks:
                await asyncio.wait(tasks)
            await replies.flush()
        finally:
            writing.cancel()
            for task in tasks:
                task.cancel()

    async def _serve_into(self, call: pb.Call, replies: _ReplyWriter, owner: Owner) -> None:
        reply = pb.Reply(call_id=call.call_id)
        await self._serve(call, reply, owner)
        replies.put(reply)

    async def _serve(self, call: pb.Call, reply: pb.Reply, owner: Owner) -> None:
        kind = call.WhichOneof("call")
        try:
            match kind:
                case "step":
                    await self._step(call.step, reply.result)
                case "open":
                    await self._open(call.open, reply.open, owner)
                case "reset":
                    await self._reset(call.reset, reply.result)
                case "state":
                    reply.state.state_json = await self._core.state(call.state.session_id)
                    reply.state.session_id = call.state.session_id
                case "close":
                    await self._core.close(call.close.session_id)
                    reply.close.SetInParent()
                case _:
                    raise InvalidCallError(
                        "expected one of open, reset, step, state, close; got an empty call",
                        ErrorCode.UNKNOWN_TYPE,
                    )
        except EnvError as error:
            session_id = "" if kind is None else getattr(getattr(call, kind), "session_id", "")
            fill_error(reply.error, error, session_id)

    def _step_now(self, request: pb.StepRequest, reply: pb.Reply | pb.StepReply) -> int:
        """About how many bytes it added to the reply."""
        session_id = request.session_id
        try:
            result = self._core.step_now(session_id, read_action(request), request.step_index)
        except EnvError as error:
            fill_error(reply.error, error, session_id)
            return len(error.message)
        fill_result(reply.result, session_id, result)
        return result.num_bytes

    async def _step_or_error(self, request: pb.StepRequest, reply: pb.StepReply) -> None:
        try:
            await self._step(request, reply.result)
        except EnvError as error:
            fill_error(reply.error, error, request.session_id)

    async def _step(self, request: pb.StepRequest, response: pb.StepResult) -> None:
        action = read_action(request)
        result = await self._core.step(
            request.session_id, action, request.step_index, request.timeout_s
        )
        fill_result(response, request.session_id, result)

    async def _reset(self, request: pb.ResetRequest, response: pb.StepResult) -> None:
        result = await self._core.reset(request.session_id, read_reset_args(request.args))
        fill_result(response, request.session_id, result)

    async def _open(
        self, request: pb.OpenRequest, response: pb.OpenResponse, owner: Owner | None
    ) -> None:
        args: ResetArgs | None = None
        if request.HasField("reset"):
            args = read_reset_args(request.reset)
        session_id, first = await self._core.open(
            args, close_when_done=request.close_when_done, owner=owner
        )
        response.session_id = session_id
        if first is not None:
            fill_result(response.first, session_id, first)


class _ReplyWriter:
    """Gathers replies and writes them in batches; the first waiting reply wakes the writer."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: list[pb.Reply] = []
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()

    def put(self, reply: pb.Reply) -> None:
        """Queues a reply."""
        self._waiting.append(reply)
        self._wake.set()

    async def write_forever(self) -> None:
        """Never returns: writes what was put."""
        while True:
            await self._wake.wait()
            await self.flush()

    async def flush(self) -> None:
        """Returns when everything that was put is written."""
        async with self._writing:
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            batch, num_bytes = pb.ReplyBatch(), 0
            for reply in waiting:
                batch.replies.append(reply)
                num_bytes += reply.ByteSize()
                if num_bytes > MAX_BATCH_BYTES:
                    await self._context.write(batch)
                    batch, num_bytes = pb.ReplyBatch(), 0
            if batch.replies:
                await self._context.write(batch)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call whose metadata lacks `authorization: Bearer <token>`."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The real handler, or one of the same shape that refuses."""
        handler = await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = metadata.get("authorization", "")
        if handler is None or is_authorized(given, self._token):
            return handler
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: Any, context: Context) -> NoReturn:
    await _abort(context, ErrorCode.UNAUTHENTICATED, MISSING_TOKEN)


async def _or_abort(context: Context, call: Awaitable[ResultT]) -> ResultT:
    """The call's value; an EnvError ends the rpc with a status and its code."""
    try:
        return await call
    except EnvError as error:
        await _abort(context, error.code, error.message)


async def _abort(context: Context, code: ErrorCode, message: str) -> NoReturn:
    status = _STATUS_OF_CODE.get(code, grpc.StatusCode.UNKNOWN)
    await context.abort(status, message, (("ludus-code", str(code)),))
    raise AssertionError("context.abort always raises")
