"""A client to play on, whether an environment is named by its target or by an address.

target --> EnvServer on a free loopback port, for as long as the client is used --> client
address ------------------------------------------------------------------------> client
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.serving.options import Isolation, ServerOptions
from ludus.env.serving.server import EnvServer
from ludus.env.sessions.hosts import EnvironmentFactory
from ludus.env.transports.interface import retry_unavailable
from ludus.proto.errors import NotFoundError, UnavailableError

CONNECT_TIMEOUT_S = 5.0
_OWN_SERVER_TIMEOUT_S = 60.0
"""It listens already; only a machine that stands still keeps it from answering."""


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """How the server is reached or started."""

    token: str | None = None
    """For an address that asks for one."""
    timeout_s: float = 60.0
    """For one call."""
    wait_s: float = 0.0
    """How long an address may take until a session can be opened there; 0 asks for none."""
    max_sessions: int = 64
    """Of a server that is started here."""
    isolation: Isolation = "inline"
    """Where its sessions run."""


@contextlib.asynccontextmanager
async def connected(
    place: EnvironmentFactory | str, options: PlayOptions | None = None
) -> AsyncIterator[AsyncEnvClient]:
    """A client of the server at an address, or of one that is started for a factory.

    Raises:
        NotFoundError: nothing answers at the address, or it opens no session in time.
    """
    options = options or PlayOptions()
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(place, str):
            address, token, patience_s = place, options.token, CONNECT_TIMEOUT_S
        else:
            server_options = ServerOptions(
                port=0, max_sessions=options.max_sessions, isolation=options.isolation
            )
            server = await stack.enter_async_context(EnvServer(place, server_options))
            address, token, patience_s = server.grpc_address, None, _OWN_SERVER_TIMEOUT_S
        try:
            if isinstance(place, str) and options.wait_s > 0:
                await _wait_for_a_session(address, token, options.wait_s)
            client = await AsyncEnvClient.connect(
                address,
                ConnectOptions(
                    token=token,
                    timeout_s=options.timeout_s,
                    connect_timeout_s=patience_s,
                    allow_ignored_seed=True,
                ),
            )
        except UnavailableError as error:
            raise NotFoundError(
                f"{error}; start a server with `ludus env serve`, or name a target"
            ) from None
        yield await stack.enter_async_context(client)


async def _wait_for_a_session(address: str, token: str | None, wait_s: float) -> None:
    """Wait until a session can be opened, which starts a server where there is none.

    Raises:
        UnavailableError: it could not within `wait_s`.
    """

    async def attempt() -> None:
        connecting = AsyncEnvClient.connect(
            address, ConnectOptions(token=token, timeout_s=wait_s, connect_timeout_s=wait_s)
        )
        async with await connecting as client:
            session, _ = await client.open(wait_s=wait_s)
            await session.close()

    try:
        async with asyncio.timeout(wait_s):
            await retry_unavailable(attempt, wait_s)
    except TimeoutError:
        raise UnavailableError(
            f"expected {address} to open a session within {wait_s:g} s, it opened none"
        ) from None
