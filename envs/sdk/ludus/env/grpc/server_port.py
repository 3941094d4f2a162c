"""The calling side of a server's gRPC port, the same for clients and gateways.

    ServerPort --Connect--> a stream of batches, once the server has accepted it
               --Describe, Status--> answers

What gRPC says of a failure becomes an EnvError here and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc

from ludus.env.grpc.call_stream import StreamBrokenError
from ludus.env.messages.protobuf import CONNECTED_KEY, read_description
from ludus.env.security.tracing import is_traced, trace_headers
from ludus.env.types import EnvironmentDescription
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import (
    AuthenticationError,
    CallTimeoutError,
    EnvError,
    UnavailableError,
    error_from_wire,
)

ResultT = TypeVar("ResultT")
ChannelOptions: TypeAlias = tuple[tuple[str, int | str], ...]

_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
"""What gRPC itself says of a connection that broke; INTERNAL when it broke under a message."""
_CONNECTING_TIMEOUT_S = 5.0
"""A connection with TLS takes four round trips; where nobody answers, another may be answered."""


def channel_options(keepalive_s: float, keepalive_timeout_s: float) -> ChannelOptions:
    """How whoever calls a server reaches it.

    Args:
        keepalive_s: a connection that is silent for so long is asked for a sign of life.
        keepalive_timeout_s: how long that may take.
    """
    timeout_ms = round(keepalive_timeout_s * 1000)
    return (
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # else a dead server's backoff outlives its client
        ("grpc.initial_reconnect_backoff_ms", 50),
        # gRPC takes this for the time that a connection may take to be made, and begins another
        # after it: with less, a client far away, or one on a busy machine, never gets one.
        ("grpc.min_reconnect_backoff_ms", round(_CONNECTING_TIMEOUT_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # A bandwidth probe that got no answer would keep the keepalive waiting for a minute.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    )


def server_name_options(server_name: str | None) -> ChannelOptions:
    """Options that look for another name in a TLS server's certificate than the address's host."""
    if not server_name:
        return ()
    return (
        ("grpc.ssl_target_name_override", server_name),
        ("grpc.default_authority", server_name),
    )


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: ChannelOptions
) -> grpc.aio.Channel:
    """A channel to host:port; without credentials it speaks no TLS."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


class ServerPort:
    """A channel to a server or a gateway, and what can be asked of it.

    Args:
        peer: its address, for messages.
        metadata: goes with every call.
        timeout_s: for one call.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        peer: str,
        metadata: tuple[tuple[str, str], ...],
        timeout_s: float,
    ) -> None:
        self._channel = channel
        self._stub = env_pb2_grpc.EnvServiceStub(channel)
        self._peer = peer
        self._metadata = metadata
        self._timeout_s = timeout_s

    async def connect(self, patience_s: float) -> GrpcDuplex:
        """A stream that the server has accepted.

        Raises:
            UnavailableError: it did not answer within `patience_s`.
            AuthenticationError: the token is missing or wrong.
        """
        call = self._stub.Connect(metadata=self._metadata)
        try:
            async with asyncio.timeout(patience_s):
                await _accepted(call)
        except TimeoutError:
            call.cancel()
            raise UnavailableError(
                f"expected an environment server at {self._peer}, got no answer within"
                f" {patience_s:.3g} s; check the address and that the server runs"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise self._typed(error) from error
        except asyncio.CancelledError:
            call.cancel()
            raise
        return GrpcDuplex(call)

    async def describe(self) -> EnvironmentDescription:
        """What the server says of its environment."""
        return read_description(await self._ask(self._stub.Describe, pb.DescribeRequest()))

    async def status(self) -> pb.StatusResponse:
        """How full the server is."""
        return await self._ask(self._stub.Status, pb.StatusRequest())

    async def close(self) -> None:
        """End all its streams and the connection."""
        await self._channel.close()

    async def _ask(self, method: Callable[..., Awaitable[ResultT]], request: Any) -> ResultT:
        metadata = self._metadata
        if is_traced():
            metadata = (*metadata, *trace_headers().items())
        try:
            return await method(request, metadata=metadata, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._typed(error) from error

    def _typed(self, error: grpc.aio.AioRpcError) -> EnvError:
        """What the status stands for; the server's own code has precedence."""
        status, details = error.code(), error.details() or ""
        metadata = dict(error.trailing_metadata() or ())
        if "ludus-code" in metadata:
            retry_after_ms = str(metadata.get("retry-after-ms", ""))
            retry_after_s = int(retry_after_ms) / 1000 if retry_after_ms.isdecimal() else 0.0
            return error_from_wire(str(metadata["ludus-code"]), details, retry_after_s)
        if status is grpc.StatusCode.UNAUTHENTICATED:
            return AuthenticationError(details)
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CallTimeoutError(
                f"expected an answer from {self._peer} within {self._timeout_s:g} s, got none"
            )
        if status in _BROKEN:
            return UnavailableError(
                f"expected an environment server at {self._peer}, could not reach it: {details};"
                " check the address and that the server runs"
            )
        return EnvError(f"{self._peer} answered {status.name}: {details}")


class GrpcDuplex:
    """A Connect call as a stream of batches."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, batch: pb.CallBatch) -> None:
        """Send a batch."""
        try:
            await self._call.write(batch)
        except grpc.aio.AioRpcError as error:
            raise StreamBrokenError(error.details() or "") from None

    async def __aiter__(self) -> AsyncIterator[pb.ReplyBatch]:
        """The batches of replies."""
        try:
            async for batch in self._call:
                yield batch
        except grpc.aio.AioRpcError as error:
            raise StreamBrokenError(error.details() or "") from None

    def cancel(self) -> None:
        """End the call."""
        self._call.cancel()


async def _accepted(call: Any) -> None:
    """Wait for the server to accept the stream; raises AioRpcError when it refuses."""
    await call.wait_for_connection()
    metadata = await call.initial_metadata()
    if CONNECTED_KEY in dict(metadata):
        return
    # A refusal without metadata of its own looks like a connection at first.
    status = await call.code()
    raise grpc.aio.AioRpcError(
        status, metadata, await call.trailing_metadata(), await call.details()
    )
