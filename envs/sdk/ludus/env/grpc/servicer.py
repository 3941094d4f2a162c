"""The gRPC wire of a server, which serves env.proto from `Sessions`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ludus.env.grpc.call_server import CallServer
from ludus.env.limits import MAX_CALL_FIELDS, MAX_CALLS_PER_MESSAGE
from ludus.env.messages.protobuf import CONNECTED_KEY, describe_message
from ludus.env.messages.status import STATUS_OF_CODE
from ludus.env.messages.wire_format import check_fields
from ludus.env.security.tokens import MISSING_TOKEN, is_authorized
from ludus.env.sessions.interface import Connection, Load, Sessions
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import EnvError, ErrorCode, InvalidCallError

Context: TypeAlias = grpc.aio.ServicerContext


class EnvServicer(env_pb2_grpc.EnvServiceServicer):
    """The EnvService of env.proto, served from one `Sessions`."""

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
            batches = parse_batches(request_iterator)
            await self._calls.serve(batches, context.write, Connection())
        except EnvError as error:
            await abort(context, error)


class UnparsedStreams(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """An interceptor that passes the messages of streams as bytes, for `parse_batches`."""

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


async def parse_batches(
    messages: AsyncIterable[bytes | pb.CallBatch],
) -> AsyncIterator[pb.CallBatch]:
    """Yield the batches of calls in a stream, and parse the messages that are still bytes.

    Raises:
        InvalidCallError: a message is malformed, has far too many fields to be parsed, or contains
            too many calls. The error ends the stream.
    """
    async for message in messages:
        batch = message if isinstance(message, pb.CallBatch) else _parse(message)
        if len(batch.calls) > MAX_CALLS_PER_MESSAGE:
            raise InvalidCallError(
                f"expected at most {MAX_CALLS_PER_MESSAGE} calls in one message, got"
                f" {len(batch.calls)}; send them in several"
            )
        yield batch


def _parse(message: bytes) -> pb.CallBatch:
    try:
        check_fields(pb.CallBatch, message, MAX_CALL_FIELDS)
        batch: pb.CallBatch = pb.CallBatch.FromString(message)
    except (ValueError, DecodeError) as error:
        raise InvalidCallError(f"expected a batch of calls: {error}") from None
    return batch


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """An interceptor that refuses calls without `authorization: Bearer <token>`."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return the handler, or a handler of the same kind that refuses the call."""
        handler = await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        authorization = metadata.get("authorization", "")
        if handler is None or is_authorized(authorization, self._token):
            return handler
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: Any, context: Context) -> NoReturn:
    await abort(context, EnvError(MISSING_TOKEN, ErrorCode.UNAUTHENTICATED))


def status_message(server_id: str, load: Load) -> pb.StatusResponse:
    """Return the message for a server's load."""
    return pb.StatusResponse(
        server_id=server_id,
        num_sessions=load.num_sessions,
        max_sessions=load.max_sessions,
        num_waiting=load.num_waiting,
        is_draining=load.is_draining,
    )


async def abort(context: Context, error: EnvError) -> NoReturn:
    """End the rpc with the error's status, and send the code and retry-after as metadata."""
    status = STATUS_OF_CODE[error.code].grpc
    metadata = [("ludus-code", str(error.code))]
    if error.retry_after_s > 0:
        metadata.append(("retry-after-ms", str(round(error.retry_after_s * 1000))))
    await context.abort(status, error.message, tuple(metadata))
    raise AssertionError("context.abort always raises")
