"""A gRPC server for tests of options that `EnvServer` does not expose."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from ludus.env.grpc.call_server import EnvServicer
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import EnvironmentFactory, make_local_host
from ludus.env.sessions.options import ServerOptions
from ludus.proto.env.v1 import env_pb2_grpc
from tests.env.counting_env import CountingEnv


@dataclass
class GrpcServer:
    """A running gRPC server and its session core."""

    core: SessionCore
    server: grpc.aio.Server
    address: str

    async def kill(self) -> None:
        """Stop the server without a grace period, so that connections and sessions are lost."""
        await self.server.stop(grace=None)
        await self.core.shut_down()


@asynccontextmanager
async def serve_grpc(
    factory: EnvironmentFactory = CountingEnv,
    *,
    port: int = 0,
    credentials: grpc.ServerCredentials | None = None,
    interceptors: tuple[grpc.aio.ServerInterceptor, ...] = (),
    **core_options: Any,
) -> AsyncIterator[GrpcServer]:
    core = SessionCore(make_local_host(factory, 8), ServerOptions(**core_options))
    options = (
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
    )
    server = grpc.aio.server(options=options, interceptors=interceptors)
    env_pb2_grpc.add_EnvServiceServicer_to_server(EnvServicer(core), server)
    if credentials is None:
        address = f"grpc://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    else:
        address = f"grpcs://localhost:{server.add_secure_port(f'localhost:{port}', credentials)}"
    await server.start()
    grpc_server = GrpcServer(core, server, address)
    try:
        yield grpc_server
    finally:
        await grpc_server.kill()
