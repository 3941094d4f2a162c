"""Gateways and environment servers for tests, in this event loop or in processes of their own."""

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
from ludus.services.gateway.fleet.endpoints import ServerEndpoint
from ludus.services.gateway.gateway import Gateway
from ludus.services.gateway.sessions.sessions import GatewaySessions
from ludus.services.gateway.tenancy.callers import ANONYMOUS, set_current_tenant
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.served import server_process

KEY = "a-session-key-for-tests-0123456789"
KEY_VARIABLE = "LUDUS_TEST_SESSION_KEY"
os.environ[KEY_VARIABLE] = KEY
NAME = "counting"
FAST = {"poll_interval_s": 0.1, "unreachable_after_s": 60.0, "retry_within_s": 60.0}
"""Polls often, and bears with a machine on which everything stands still for seconds."""


def env_server(factory: Callable[[], Any] = CountingEnv, **options: Any) -> EnvServer:
    """A server that shares the tests' session key, to be entered with `async with`."""
    return EnvServer(factory, ServerOptions(**{"port": 0, "session_key": KEY, **options}))


def config_of(*addresses: str, **fields: Any) -> GatewayConfig:
    """A gateway on free ports over servers at fixed addresses."""
    raw = {
        "environments": {NAME: {"addresses": list(addresses), "kind": "static"}},
        "port": 0,
        "servers": FAST,
        "session_key_env": KEY_VARIABLE,
        **fields,
    }
    return GatewayConfig.parse(raw)


def gateway_to(*servers: Any, **fields: Any) -> Gateway:
    """A gateway to running servers, to be entered with `async with`."""
    return Gateway(config_of(*(server.grpc_address for server in servers), **fields))


class ListedServers:
    """A source that the test decides over."""

    def __init__(self, *endpoints: ServerEndpoint) -> None:
        self._endpoints = list(endpoints)
        self._publish: Callable[[list[ServerEndpoint]], None] | None = None

    async def watch(self, publish: Callable[[list[ServerEndpoint]], None]) -> None:
        self._publish = publish
        publish(self._endpoints)
        await asyncio.Event().wait()

    def list(self, *endpoints: ServerEndpoint) -> None:
        """The list from now on."""
        assert self._publish is not None, "it is not watched yet"
        self._publish(list(endpoints))

    async def close(self) -> None:
        pass


def endpoint_of(server: Any, **fields: Any) -> ServerEndpoint:
    """A running server as its source sees it."""
    return ServerEndpoint(server.grpc_address, server.grpc_address, server.http_address, **fields)


@asynccontextmanager
async def served(num_servers: int = 1, **fields: Any) -> AsyncIterator[tuple[Gateway, list]]:
    """A gateway and its servers, all in this event loop.

    `server_options` go to the servers, `clock` to the gateway, everything else to its
    configuration.
    """
    clock = fields.pop("clock", time.monotonic)
    server_options = fields.pop("server_options", {})
    factory = fields.pop("factory", CountingEnv)
    servers = [env_server(factory, **server_options) for _ in range(num_servers)]
    for server in servers:
        await server.start()
    try:
        config = config_of(*(server.grpc_address for server in servers), **fields)
        async with Gateway(config, clock=clock) as gateway:
            yield gateway, servers
    finally:
        for server in servers:
            await server.stop()


@asynccontextmanager
async def client_of(place: Gateway | str, **options: Any) -> AsyncIterator[AsyncEnvClient]:
    """A client of a gateway's gRPC port, or of an address."""
    address = place if isinstance(place, str) else place.grpc_address
    async with await AsyncEnvClient.connect(address, ConnectOptions(**options)) as client:
        yield client


def http_of(gateway: Gateway) -> httpx.AsyncClient:
    """A client of a gateway's HTTP port, to be entered with `async with`."""
    return httpx.AsyncClient(base_url=gateway.http_address, timeout=60)


def sessions_of(gateway: Gateway) -> GatewaySessions:
    """A gateway's sessions for the test itself, which from now on is anybody to them."""
    set_current_tenant(ANONYMOUS)
    return gateway.environments[NAME]


def num_sessions(servers: list[EnvServer]) -> int:
    """Sessions that are open on the servers."""
    return sum(server.core.load.num_sessions for server in servers)


__all__ = [
    "FAST",
    "KEY",
    "NAME",
    "CountingEnv",
    "ListedServers",
    "ThreadedCountingEnv",
    "client_of",
    "config_of",
    "endpoint_of",
    "env_server",
    "gateway_to",
    "http_of",
    "num_sessions",
    "served",
    "server_process",
    "sessions_of",
]
