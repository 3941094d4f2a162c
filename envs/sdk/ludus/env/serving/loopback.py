"""A client of an environment, which a target or an address names.

target --> EnvServer on a free loopback port, as long as the client is open --> client
address ---------------------------------------------------------------------> client
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ludus.env.backoff import retry_unavailable
from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.sandbox.confine import Layer
from ludus.env.serving.server import EnvServer
from ludus.env.sessions.hosts import EnvironmentFactory
from ludus.env.sessions.options import Isolation, ServerOptions
from ludus.proto.errors import NotFoundError, UnavailableError

CONNECT_TIMEOUT_S = 5.0
_LOCAL_TIMEOUT_S = 60.0
"""Time limit for a local server, which listens already but answers late on a busy machine."""


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """Options of `open_client`."""

    token: str | None = None
    """Token for an address that requires one."""
    timeout_s: float = 60.0
    """Time limit of a call."""
    wait_s: float = 0.0
    """Maximum wait until a session can be opened at an address; 0 does not try."""
    max_sessions: int = 64
    """Maximum number of sessions of a local server."""
    isolation: Isolation = "inline"
    """Isolation of a local server's sessions."""


@contextlib.asynccontextmanager
async def open_client(
    factory_or_address: EnvironmentFactory | str, options: PlayOptions | None = None
) -> AsyncIterator[AsyncEnvClient]:
    """Open a client of the server at an address, or of a new local server for a factory.

    Raises:
        NotFoundError: no server answers at the address, or it opens no session in time.
    """
    options = options or PlayOptions()
    async with contextlib.AsyncExitStack() as exit_stack:
        if isinstance(factory_or_address, str):
            address, token, connect_timeout_s = factory_or_address, options.token, CONNECT_TIMEOUT_S
        else:
            max_sessions, isolation = options.max_sessions, options.isolation
            server_options = ServerOptions(
                port=0,
                max_sessions=max_sessions,
                isolation=isolation,
                # The only client is this process, which chose the environment.
                accept_missing=() if isolation == "inline" else tuple(Layer),
            )
            local_server = EnvServer(factory_or_address, server_options)
            await exit_stack.enter_async_context(local_server)
            address, token, connect_timeout_s = local_server.grpc_address, None, _LOCAL_TIMEOUT_S
        try:
            if isinstance(factory_or_address, str) and options.wait_s > 0:
                await _wait_for_session(address, token, options.wait_s)
            connect_options = ConnectOptions(
                token=token,
                timeout_s=options.timeout_s,
                connect_timeout_s=connect_timeout_s,
                allow_ignored_seed=True,
            )
            client = await AsyncEnvClient.connect(address, connect_options)
        except UnavailableError as error:
            remedy = "start a server with `ludus env serve`, or name a target"
            raise NotFoundError(f"{error}; {remedy}") from None
        yield await exit_stack.enter_async_context(client)


async def _wait_for_session(address: str, token: str | None, wait_s: float) -> None:
    """Wait until a session can be opened, which may start a server."""

    async def attempt() -> None:
        connection = AsyncEnvClient.connect(
            address, ConnectOptions(token=token, timeout_s=wait_s, connect_timeout_s=wait_s)
        )
        async with await connection as client:
            session, _ = await client.open(wait_s=wait_s)
            await session.close()

    try:
        async with asyncio.timeout(wait_s):
            await retry_unavailable(attempt, wait_s)
    except TimeoutError:
        raise UnavailableError(f"{address} did not open a session within {wait_s:g} s") from None
