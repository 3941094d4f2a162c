"""The gRPC wire of a server: env.proto over `Sessions`."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc

from ludus.env.grpc.call_server import CallServer
from ludus.env.grpc.step_stream import answer_in_order, read_ahead
from ludus.env.messages.protobuf import CONNECTED_KEY, describe_message
from ludus.env.messages.status import STATUS_OF_CODE
from ludus.env.security.tokens import MISSING_TOKEN, is_authorized
from ludus.env.sessions.interface import Connection, Sessions
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import EnvError, ErrorCode

ResultT = TypeVar("ResultT")
Context: TypeAlias = grpc.aio.ServicerContext


class EnvServicer(env_pb2_grpc.EnvServiceServicer):
    """Every rpc of env.proto's EnvService, served from one `Sessions`."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._calls = CallServer(sessions)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        return describe_message(self._sessions.description)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        load = self._sessions.load
        return pb.StatusResponse(
            server_id=self._sessions.description.server_id,
            num_sessions=load.num_sessions,
            max_sessions=load.max_sessions,
            num_waiting=load.num_waiting,
            is_draining=load.is_draining,
        )

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenResponse:
        response = pb.OpenResponse()
        await or_abort(context, self._calls.open(request, response, None))
        return response

    async def OpenGroup(
        self, request: pb.OpenGroupRequest, context: Context
    ) -> pb.OpenGroupResponse:
        response = pb.OpenGroupResponse()
        await or_abort(context, self._calls.open_group(request, response, None))
        return response

    async def Reset(self, request: pb.ResetRequest, context: Context) -> pb.StepResult:
        response = pb.StepResult()
        await or_abort(context, self._calls.reset(request, response))
        return response

    async def Step(self, request: pb.StepRequest, context: Context) -> pb.StepResult:
        response = pb.StepResult()
        await or_abort(context, self._calls.step(request, response))
        return response

    async def State(self, request: pb.StateRequest, context: Context) -> pb.StateResponse:
        response = pb.StateResponse()
        await or_abort(context, self._calls.state(request, response))
        return response

    async def CallTool(self, request: pb.CallToolRequest, context: Context) -> pb.CallToolResponse:
        response = pb.CallToolResponse()
        await or_abort(context, self._calls.call_tool(request, response))
        return response

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseResponse:
        await or_abort(context, self._sessions.close(request.session_id))
        return pb.CloseResponse()

    async def Detach(self, request: pb.DetachRequest, context: Context) -> pb.CloseResponse:
        await or_abort(context, self._sessions.detach(request.session_id))
        return pb.CloseResponse()

    async def StepMany(self, request: pb.StepManyRequest, context: Context) -> pb.StepManyResponse:
        return await self._calls.step_many(request)

    async def StepStream(self, request_iterator: Any, context: Context) -> None:
        await context.send_initial_metadata(((CONNECTED_KEY, "1"),))
        if self._calls.answers_at_once:
            async with contextlib.aclosing(read_ahead(request_iterator)) as requests:
                async for request in requests:
                    await context.write(await self._calls.step_many(request))
        else:
            await answer_in_order(request_iterator, self._calls.step_many, context.write)

    async def Connect(self, request_iterator: Any, context: Context) -> None:
        await context.send_initial_metadata(((CONNECTED_KEY, "1"),))
        await self._calls.serve(request_iterator, context.write, Connection())


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
    await abort(context, EnvError(MISSING_TOKEN, ErrorCode.UNAUTHENTICATED))


async def or_abort(context: Context, call: Awaitable[ResultT]) -> ResultT:
    """The call's value; an EnvError ends the rpc with a status and its code."""
    try:
        return await call
    except EnvError as error:
        await abort(context, error)


async def abort(context: Context, error: EnvError) -> NoReturn:
    """Ends the rpc with the error's status; code and retry-after travel as metadata."""
    status = STATUS_OF_CODE[error.code].grpc
    metadata = [("ludus-code", str(error.code))]
    if error.retry_after_s > 0:
        metadata.append(("retry-after-ms", str(round(error.retry_after_s * 1000))))
    await context.abort(status, error.message, tuple(metadata))
    raise AssertionError("context.abort always raises")
