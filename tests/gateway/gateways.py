"""Gateways, environment servers and clients for the gateway tests."""

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
from tests.env.served import start_server_process

KEY = "a-session-key-for-tests-0123456789"
KEY_VARIABLE = "LUDUS_TEST_SESSION_KEY"
os.environ[KEY_VARIABLE] = KEY
NAME = "counting"
FAST_POLLING = {"poll_interval_s": 0.1, "unreachable_after_s": 60.0, "retry_within_s": 60.0}
"""Gateway settings that poll servers often and tolerate long pauses on a busy machine."""


def make_server(factory: Callable[[], Any] = CountingEnv, **options: Any) -> EnvServer:
    """Return a server that uses the session key of the tests."""
    return EnvServer(factory, ServerOptions(**{"port": 0, "session_key": KEY, **options}))


def make_config(*addresses: str, **fields: Any) -> GatewayConfig:
    """Return a gateway configuration with free ports and fixed server addresses."""
    config = {
        "environments": {NAME: {"addresses": list(addresses), "kind": "static"}},
        "port": 0,
        "servers": FAST_POLLING,
        "session_key_env": KEY_VARIABLE,
        **fields,
    }
    return GatewayConfig.parse(config)


def make_gateway(*servers: Any, **fields: Any) -> Gateway:
    """Return a gateway for running servers."""
    return Gateway(make_config(*(server.grpc_address for server in servers), **fields))


class ListedServers:
    """A server source whose list of endpoints is set by the test."""

    def __init__(self, *endpoints: ServerEndpoint) -> None:
        self._endpoints = list(endpoints)
        self._publish: Callable[[list[ServerEndpoint]], None] | None = None

    async def watch(self, publish: Callable[[list[ServerEndpoint]], None]) -> None:
        self._publish = publish
        publish(self._endpoints)
        await asyncio.Event().wait()

    def list(self, *endpoints: ServerEndpoint) -> None:
        """Publish a new list of endpoints."""
        assert self._publish is not None, "the gateway does not watch this source yet"
        self._publish(list(endpoints))

    async def close(self) -> None:
        pass


def make_endpoint(server: Any, **fields: Any) -> ServerEndpoint:
    """Return the endpoint of a running server."""
    return ServerEndpoint(server.grpc_address, server.grpc_address, server.http_address, **fields)


@asynccontextmanager
async def run_gateway(num_servers: int = 1, **fields: Any) -> AsyncIterator[tuple[Gateway, list]]:
    """Run a gateway and its servers in the event loop of the test; yield both.

    `factory` and `server_options` configure the servers. `clock` is passed to the gateway,
    and all other options are fields of the gateway's configuration.
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
    """Connect a client to the gRPC port of a gateway, or to an address."""
    address = target if isinstance(target, str) else target.grpc_address
    async with await AsyncEnvClient.connect(address, ConnectOptions(**options)) as client:
        yield client


def make_http_client(gateway: Gateway) -> httpx.AsyncClient:
    """Return an HTTP client for a gateway."""
    return httpx.AsyncClient(base_url=gateway.http_address, timeout=60)


def get_sessions(gateway: Gateway) -> GatewaySessions:
    """Set the anonymous tenant as the current tenant; return the sessions of a gateway."""
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
    "start_server_process",
]
