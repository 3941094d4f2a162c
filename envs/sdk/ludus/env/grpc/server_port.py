"""The caller's side of a server's gRPC port, for clients and gateways.

    GrpcClient --Connect--> a stream of batches that the server has accepted
               --Describe, Status--> responses

Only this module converts gRPC failures to EnvErrors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc

from ludus.env.grpc.call_stream import StreamBrokenError
from ludus.env.messages.protobuf import CONNECTED_KEY, read_description
from ludus.env.security.tracing import is_traced, make_trace_headers
from ludus.env.types import EnvironmentDescription
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import (
    AuthenticationError,
    CallTimeoutError,
    EnvError,
    UnavailableError,
    make_wire_error,
)

ResponseT = TypeVar("ResponseT")
ChannelOptions: TypeAlias = tuple[tuple[str, int | str], ...]

_BROKEN_CONNECTION_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
"""gRPC status codes for a broken connection. INTERNAL means that it broke during a message."""
_ATTEMPT_TIMEOUT_S = 5.0
"""Time limit of one connection attempt. With TLS, an attempt takes four round trips."""


def open_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    server_name: str | None,
    *,
    keepalive_s: float,
    keepalive_timeout_s: float,
    options: ChannelOptions = (),
) -> grpc.aio.Channel:
    """Open a channel to host:port. Without credentials, it uses no TLS.

    Args:
        server_name: name in the TLS certificate. Default: the host.
        keepalive_s: time without traffic after which the connection is probed.
        keepalive_timeout_s: time limit for the response to the probe.
        options: additional options of gRPC.
    """
    timeout_ms = round(keepalive_timeout_s * 1000)
    options = (
        *options,
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),
        # A shared pool would also delay later clients by the backoff for a dead server.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # gRPC also uses this value as the time limit of a connection attempt. With a lower value,
        # a distant client or a client on a busy machine never connects.
        ("grpc.min_reconnect_backoff_ms", round(_ATTEMPT_TIMEOUT_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # Without this limit, a bandwidth probe without a response delays the keepalive by a minute.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    )
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    if server_name:
        override_names = ("grpc.ssl_target_name_override", "grpc.default_authority")
        options += tuple((name, server_name) for name in override_names)
    return grpc.aio.secure_channel(target, credentials, options=options)


class GrpcClient:
    """The gRPC calls to a server or a gateway, over one channel.

    Args:
        peer_name: address of the server, for messages.
        read_metadata: returns the metadata of a call, which may change.
        timeout_s: time limit of one call.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        peer_name: str,
        read_metadata: Callable[[], tuple[tuple[str, str], ...]],
        timeout_s: float,
    ) -> None:
        self._channel = channel
        self._stub = env_pb2_grpc.EnvServiceStub(channel)  # type: ignore[no-untyped-call]
        self._peer_name = peer_name
        self._read_metadata = read_metadata
        self._timeout_s = timeout_s

    async def connect(self, timeout_s: float) -> GrpcDuplex:
        """Open a stream, and return it when the server has accepted it.

        Raises:
            UnavailableError: the server did not respond within `timeout_s`.
            AuthenticationError: the token is missing or wrong.
        """
        call = self._stub.Connect(metadata=self._read_metadata())
        try:
            async with asyncio.timeout(timeout_s):
                await _wait_until_accepted(call)
        except TimeoutError:
            call.cancel()
            raise UnavailableError(
                f"the environment server at {self._peer_name} did not respond within"
                f" {timeout_s:.3g} s; check the address and that the server runs"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise self._convert_error(error) from error
        except asyncio.CancelledError:
            call.cancel()
            raise
        return GrpcDuplex(call)

    async def describe(self) -> EnvironmentDescription:
        """Return the server's description of its environment."""
        return read_description(await self._call(self._stub.Describe, pb.DescribeRequest()))

    async def status(self) -> pb.StatusResponse:
        """Return the server's load."""
        return await self._call(self._stub.Status, pb.StatusRequest())

    async def close(self) -> None:
        """Close the connection and all its streams."""
        await self._channel.close()

    async def _call(self, method: Callable[..., Awaitable[ResponseT]], request: Any) -> ResponseT:
        metadata = self._read_metadata()
        if is_traced():
            metadata = (*metadata, *make_trace_headers().items())
        try:
            return await method(request, metadata=metadata, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._convert_error(error) from error

    def _convert_error(self, error: grpc.aio.AioRpcError) -> EnvError:
        """Return the error for a status. The server's error code takes precedence."""
        status_code, details = error.code(), error.details() or ""
        metadata = dict(error.trailing_metadata() or ())
        if "ludus-code" in metadata:
            retry_after_ms = str(metadata.get("retry-after-ms", ""))
            retry_after_s = int(retry_after_ms) / 1000 if retry_after_ms.isdecimal() else 0.0
            return make_wire_error(str(metadata["ludus-code"]), details, retry_after_s)
        if status_code is grpc.StatusCode.UNAUTHENTICATED:
            return AuthenticationError(details)
        if status_code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CallTimeoutError(
                f"{self._peer_name} did not respond within {self._timeout_s:g} s"
            )
        if status_code in _BROKEN_CONNECTION_CODES:
            return UnavailableError(
                f"could not reach an environment server at {self._peer_name}: {details}; check the"
                " address and that the server runs"
            )
        return EnvError(f"{self._peer_name} returned status {status_code.name}: {details}")


class GrpcDuplex:
    """A duplex stream over a Connect call. `Duplex` documents its methods."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, batch: pb.CallBatch) -> None:
        try:
            await self._call.write(batch)
        except grpc.aio.AioRpcError as error:
            raise StreamBrokenError(error.details() or "") from None

    async def __aiter__(self) -> AsyncIterator[pb.ReplyBatch]:
        try:
            async for batch in self._call:
                yield batch
        except grpc.aio.AioRpcError as error:
            raise StreamBrokenError(error.details() or "") from None

    def cancel(self) -> None:
        self._call.cancel()


async def _wait_until_accepted(call: Any) -> None:
    """Wait until the server accepts the stream; raises AioRpcError if the server refuses it."""
    await call.wait_for_connection()
    metadata = await call.initial_metadata()
    if CONNECTED_KEY in dict(metadata):
        return
    # Without initial metadata, a refused stream looks like a connection until its code is read.
    code = await call.code()
    raise grpc.aio.AioRpcError(code, metadata, await call.trailing_metadata(), await call.details())
