"""A client to play on, whether an environment is named by its target or by an address.

target --> EnvServer on a free loopback port, for as long as the client is used --> client
address ------------------------------------------------------------------------> client
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ludus.env.client import AsyncEnvClient
from ludus.env.serving.options import Isolation, ServerOptions
from ludus.env.serving.server import EnvServer
from ludus.env.sessions.hosts import EnvironmentFactory
from ludus.proto.errors import NotFoundError, UnavailableError

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """How the server is reached or started."""

    token: str | None = None
    """For an address that asks for one."""
    timeout_s: float = 60.0
    """For one call."""
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
        NotFoundError: nothing answers at the address.
    """
    options = options or PlayOptions()
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(place, str):
            address, token = place, options.token
        else:
            server_options = ServerOptions(
                port=0, max_sessions=options.max_sessions, isolation=options.isolation
            )
            server = await stack.enter_async_context(EnvServer(place, server_options))
            address, token = server.grpc_address, None
        try:
            client = await AsyncEnvClient.connect(
                address,
                token=token,
                timeout_s=options.timeout_s,
                connect_timeout_s=CONNECT_TIMEOUT_S,
                allow_ignored_seed=True,
            )
        except UnavailableError as error:
            raise NotFoundError(
                f"{error}; start a server with `ludus env serve`, or name a target"
            ) from None
        yield await stack.enter_async_context(client)
