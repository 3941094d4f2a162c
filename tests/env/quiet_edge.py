"""A gRPC proxy that reports the end of a stream only when the client sends a message."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from ludus.env.messages.protobuf import CONNECTED_KEY
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc


class QuietEdge(env_pb2_grpc.EnvServiceServicer):
    """A gRPC proxy: `async with QuietEdge(server.grpc_address) as edge`."""

    def __init__(self, upstream: str) -> None:
        self.address = ""
        self.upstreams: list[Any] = []
        """Streams to the server. Cancelling a stream ends it without notifying the client."""
        self._channel = grpc.aio.insecure_channel(upstream.removeprefix("grpc://"))
        self._stub = env_pb2_grpc.EnvServiceStub(self._channel)
        self._server = grpc.aio.server()

    async def __aenter__(self) -> QuietEdge:
        env_pb2_grpc.add_EnvServiceServicer_to_server(self, self._server)
        self.address = f"grpc://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(grace=0)
        await self._channel.close()

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        return await self._stub.Describe(request)

    async def Connect(self, batches: Any, context: Any) -> None:
        await context.send_initial_metadata(((CONNECTED_KEY, "1"),))
        upstream = self._stub.Connect()
        self.upstreams.append(upstream)
        forward_task = asyncio.create_task(_forward_replies(upstream, context))
        async for batch in batches:
            if forward_task.done():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream has ended")
            await upstream.write(batch)
        upstream.cancel()


async def _forward_replies(upstream: Any, context: Any) -> None:
    async for replies in upstream:
        await context.write(replies)
