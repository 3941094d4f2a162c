"""The gRPC wire of a server: env.proto over `Sessions`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc

from ludus.env.grpc.call_server import CallServer
from ludus.env.messages.protobuf import CONNECTED_KEY, describe_message
from ludus.env.messages.status import STATUS_OF_CODE
from ludus.env.security.tokens import MISSING_TOKEN, is_authorized
from ludus.env.sessions.interface import Connection, Load, Sessions
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import EnvError, ErrorCode

Context: TypeAlias = grpc.aio.ServicerContext


class EnvServicer(env_pb2_grpc.EnvServiceServicer):
    """Every rpc of env.proto's EnvService, served from one `Sessions`."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._calls = CallServer(sessions)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        return describe_message(self._sessions.description)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        return status_message(self._sessions.description.server_id, self._sessions.load)

    async def Connect(self, request_iterator: Any, context: Context) -> None:
        await context.send_initial_metadata(((CONNECTED_KEY, "1"),))
        try:
            await self._calls.serve(request_iterator, context.write, Connection())
        except EnvError as error:
            await abort(context, error)


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


def status_message(server_id: str, load: Load) -> pb.StatusResponse:
    """How full a server is, as it travels."""
    return pb.StatusResponse(
        server_id=server_id,
        num_sessions=load.num_sessions,
        max_sessions=load.max_sessions,
        num_waiting=load.num_waiting,
        is_draining=load.is_draining,
    )


async def abort(context: Context, error: EnvError) -> NoReturn:
    """End the rpc with the error's status; code and retry-after travel as metadata."""
    status = STATUS_OF_CODE[error.code].grpc
    metadata = [("ludus-code", str(error.code))]
    if error.retry_after_s > 0:
        metadata.append(("retry-after-ms", str(round(error.retry_after_s * 1000))))
    await context.abort(status, error.message, tuple(metadata))
    raise AssertionError("context.abort always raises")
