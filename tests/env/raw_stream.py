"""A Connect stream for single calls with any session id."""

from __future__ import annotations

import grpc

from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc


class RawStream:
    """A stream to a gRPC address. Its sessions end with the stream unless they linger."""

    def __init__(self, address: str, token: str = "") -> None:
        self.channel = grpc.aio.insecure_channel(address.removeprefix("grpc://"))
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.call = env_pb2_grpc.EnvServiceStub(self.channel).Connect(metadata=metadata)

    async def ask(self, call: pb.Call) -> pb.Reply:
        """Send a call and return its reply."""
        await self.call.write(pb.CallBatch(calls=[call]))
        (reply,) = (await self.call.read()).replies
        assert reply.call_id == call.call_id
        return reply

    async def open(self, **fields) -> str:
        """Open a session and return its id."""
        reply = await self.ask(pb.Call(open=pb.OpenRequest(**fields)))
        assert not reply.HasField("error"), reply.error
        return reply.open.session_id

    async def __aenter__(self) -> RawStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.call.cancel()
        await self.channel.close()
