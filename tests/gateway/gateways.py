"""Gateways and environment servers for tests, in this event loop or in separate processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.services.gateway.config import GatewayConfig
from ludus.services.gateway.fleet.sources import ServerEndpoint
from ludus.services.gateway.gateway import Gateway
from ludus.services.gateway.sessions.sessions import GatewaySessions
from ludus.services.gateway.tenancy.tenants import ANONYMOUS, set_current_tenant
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.served import server_process

KEY = "a-session-key-for-tests-0123456789"
KEY_VARIABLE = "LUDUS_TEST_SESSION_KEY"
os.environ[KEY_VARIABLE] = KEY
NAME = "counting"
FAST_POLLING = {"poll_interval_s": 0.1, "unreachable_after_s": 60.0, "retry_within_s": 60.0}
"""Server options that poll often and tolerate pauses of seconds on a busy machine."""


def make_server(factory: Callable[[], Any] = CountingEnv, **options: Any) -> EnvServer:
    """Build a server with the tests' session key, used with `async with`."""
    return EnvServer(factory, ServerOptions(**{"port": 0, "session_key": KEY, **options}))


def make_config(*addresses: str, **fields: Any) -> GatewayConfig:
    """Return the configuration of a gateway on free ports with servers at fixed addresses."""
    config = {
        "environments": {NAME: {"addresses": list(addresses), "kind": "static"}},
        "port": 0,
        "servers": FAST_POLLING,
        "session_key_env": KEY_VARIABLE,
        **fields,
    }
    return GatewayConfig.parse(config)


def make_gateway(*servers: Any, **fields: Any) -> Gateway:
    """Build a gateway to running servers, used with `async with`."""
    return Gateway(make_config(*(server.grpc_address for server in servers), **fields))


class ListedServers:
    """A source with the servers that a test lists."""

    def __init__(self, *endpoints: ServerEndpoint) -> None:
        self._endpoints = list(endpoints)
        self._publish: Callable[[list[ServerEndpoint]], None] | None = None

    async def watch(self, publish: Callable[[list[ServerEndpoint]], None]) -> None:
        self._publish = publish
        publish(self._endpoints)
        await asyncio.Event().wait()

    def list(self, *endpoints: ServerEndpoint) -> None:
        """Replace the list."""
        assert self._publish is not None, "it is not watched yet"
        self._publish(list(endpoints))

    async def close(self) -> None:
        pass


def make_endpoint(server: Any, **fields: Any) -> ServerEndpoint:
    """Return the endpoint of a running server."""
    return ServerEndpoint(server.grpc_address, server.grpc_address, server.http_address, **fields)


@asynccontextmanager
async def run_gateway(num_servers: int = 1, **fields: Any) -> AsyncIterator[tuple[Gateway, list]]:
    """Run a gateway and its servers in this event loop.

    `server_options` go to the servers, `clock` to the gateway, other options to its configuration.
    """
    clock = fields.pop("clock", time.monotonic)
    server_options = fields.pop("server_options", {})
    factory = fields.pop("factory", CountingEnv)
    servers = [make_server(factory, **server_options) for _ in range(num_servers)]
    for server in servers:
        await server.start()
    try:
        config = make_config(*(server.grpc_address for server in servers), **fields)
        async with Gateway(config, clock=clock) as gateway:
            yield gateway, servers
    finally:
        for server in servers:
            await server.stop()


@asynccontextmanager
async def connect_client(target: Gateway | str, **options: Any) -> AsyncIterator[AsyncEnvClient]:
    """Connect a client to a gateway's gRPC port or to an address."""
    address = target if isinstance(target, str) else target.grpc_address
    async with await AsyncEnvClient.connect(address, ConnectOptions(**options)) as client:
        yield client


def make_http_client(gateway: Gateway) -> httpx.AsyncClient:
    """Build a client of a gateway's HTTP port, used with `async with`."""
    return httpx.AsyncClient(base_url=gateway.http_address, timeout=60)


def get_sessions(gateway: Gateway) -> GatewaySessions:
    """Return a gateway's sessions, and make the test an anonymous tenant."""
    set_current_tenant(ANONYMOUS)
    return gateway.environments[NAME]


def count_sessions(servers: list[EnvServer]) -> int:
    """Return the number of open sessions on the servers."""
    return sum(server.core.load.num_sessions for server in servers)


__all__ = [
    "FAST_POLLING",
    "KEY",
    "NAME",
    "CountingEnv",
    "ListedServers",
    "ThreadedCountingEnv",
    "connect_client",
    "count_sessions",
    "get_sessions",
    "make_config",
    "make_endpoint",
    "make_gateway",
    "make_http_client",
    "make_server",
    "run_gateway",
    "server_process",
]
