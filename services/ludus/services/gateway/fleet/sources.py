"""Environment servers behind a gateway, and the sources that list them.

    EndpointSource --whole list, on every change--> Fleet (places sessions and routes calls)

The sources of this module list servers at fixed addresses, or run servers on this machine. If a
server on this machine dies, it leaves the list immediately, its sessions end, and a new server
replaces it, after pauses that grow with repeated failures. `gateway/kubernetes` has the sources for
a cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ludus.env.backoff import generate_pauses
from ludus.env.serving.subprocess import LocalServer
from ludus.env.sessions.options import ServerAddresses
from ludus.proto.errors import LudusError, UserError

_log = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.2
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 10.0
_STABLE_AFTER_S = 10.0
"""Lifetime in seconds after which a server counts as stable, so that pauses are short again."""
_MAX_PARALLEL_STARTS = 4


@dataclass(frozen=True, slots=True)
class ServerEndpoint:
    """An environment server as its source lists it."""

    key: str
    """Unique name of the server in its source: an address, or a pod's uid. It never changes."""
    grpc_address: str
    """gRPC address, for example grpc://10.0.0.7:18000."""
    http_address: str
    """HTTP address, for example http://10.0.0.7:8000; empty if unknown."""
    is_ready: bool = True
    """True if the server accepts new sessions."""
    is_terminating: bool = False
    """True if the server is being stopped; it keeps its sessions and accepts no new ones."""
    server_id: str = ""
    """Id of the server in session ids; empty if only the server itself can report it."""
    pod_name: str = ""
    """Name of the server's pod; empty outside a cluster."""
    max_opens: int | None = None
    """Total number of sessions that this gateway may open on the server; None means no limit."""


PublishCallback = Callable[[Sequence[ServerEndpoint]], None]


class EndpointSource(Protocol):
    """A source that lists the servers of one environment."""

    async def watch(self, publish: PublishCallback) -> None:
        """Publish the whole list when it is first known and after each change, until cancelled."""

    async def close(self) -> None:
        """Stop everything that the source started."""


class StaticSource:
    """A source of servers at gRPC addresses that never change."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._endpoints = [ServerEndpoint(address, address, "") for address in addresses]

    async def watch(self, publish: PublishCallback) -> None:
        """Publish the addresses once, then wait until cancelled."""
        publish(self._endpoints)
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Do nothing, because nothing was started."""


class SubprocessSource:
    """A source that runs the servers of one environment as processes on this machine.

    Args:
        make_server: returns a new server that has not been started.
    """

    def __init__(self, make_server: Callable[[], LocalServer], num_servers: int) -> None:
        self.servers: dict[str, LocalServer] = {}
        """The latest server of each key."""
        self._make_server = make_server
        self._keys = [f"server-{number}" for number in range(1, num_servers + 1)]
        self._endpoints: dict[str, ServerEndpoint] = {}
        """Endpoints of the servers that are ready, by key."""
        self._tasks: list[asyncio.Task[None]] = []
        # These threads live as long as the source: the kernel kills a server when the thread that
        # started it exits.
        self._executor = ThreadPoolExecutor(_MAX_PARALLEL_STARTS, "ludus-gateway-servers")
        self._has_started = False

    async def watch(self, publish: PublishCallback) -> None:
        """Run the servers, and publish those that are ready, until cancelled.

        Raises:
            UserError: no server has started yet, and one refused its target, options or arguments.
        """
        self._tasks = [asyncio.create_task(self._supervise(key, publish)) for key in self._keys]
        finished_tasks, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        await next(iter(finished_tasks))

    async def close(self) -> None:
        """Stop every server."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._executor.shutdown(wait=False)

    async def _supervise(self, key: str, publish: PublishCallback) -> None:
        """Run a server, and replace it when it dies, until cancelled."""
        loop = asyncio.get_running_loop()
        pauses = generate_pauses(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
        while True:
            started_s = loop.time()
            server = self.servers[key] = self._make_server()
            try:
                addresses = await self._start_server(server)
                self._has_started = True
                self._endpoints[key] = ServerEndpoint(key, addresses.grpc, addresses.http)
                publish(list(self._endpoints.values()))
                while server.is_running:
                    await asyncio.sleep(_WATCH_INTERVAL_S)
                _log.warning("environment server %s died; starting another one", key)
                del self._endpoints[key]
                publish(list(self._endpoints.values()))
            except LudusError as error:
                if isinstance(error, UserError) and not self._has_started:
                    raise
                _log.error("cannot start an environment server: %s", error)
            finally:
                await asyncio.shield(loop.run_in_executor(self._executor, server.stop))
            if loop.time() - started_s > _STABLE_AFTER_S:
                pauses = generate_pauses(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
            await asyncio.sleep(next(pauses))

    async def _start_server(self, server: LocalServer) -> ServerAddresses:
        start_future = asyncio.get_running_loop().run_in_executor(self._executor, server.start)
        try:
            return await asyncio.shield(start_future)
        except asyncio.CancelledError:
            # The thread cannot be cancelled, so stop the server that it may still start.
            while not start_future.done():
                server.stop()
                await asyncio.wait([start_future], timeout=0.2)
            raise
