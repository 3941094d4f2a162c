"""Sources for servers at fixed addresses and for servers that the gateway runs on this machine.

    scale(n) --> a task supervises each server: start, watch, start again --publish--> Fleet

A server that dies leaves the list immediately, its sessions end, and a new server replaces it;
repeated failures make the pauses longer. A server that scaling removes is listed as terminating
until it is empty or its grace period is over.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ludus.env.backoff import doubling
from ludus.env.serving.subprocess import LocalServer
from ludus.proto.errors import ConfigError, LudusError, UserError
from ludus.services.gateway.fleet.endpoints import Publish, ServerEndpoint

_log = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.2
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 10.0
_STABLE_AFTER_S = 10.0
"""Lifetime in seconds after which a server counts as stable and the pauses start again."""
_MAX_PARALLEL_STARTS = 4
_EMPTY_FOR_S = 2.5
"""Seconds that a leaving server must be empty before it stops; loads are polled each second."""


class StaticSource:
    """A source of servers at addresses that never change.

    Args:
        addresses: gRPC addresses, for example grpc://10.0.0.7:18000.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._endpoints = [ServerEndpoint(address, address, "") for address in addresses]

    async def watch(self, publish: Publish) -> None:
        """Publish the addresses once, then wait until cancelled."""
        publish(self._endpoints)
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Do nothing, because nothing was started."""


@dataclass(slots=True, eq=False)
class _ServerSlot:
    """A slot for one server, and its current server."""

    key: str
    server: LocalServer | None = None
    endpoint: ServerEndpoint | None = None
    """Endpoint of the server; None while no server listens."""
    is_leaving: bool = False


class SubprocessSource:
    """A source that runs the servers of one environment as processes on this machine.

    Args:
        make_server: returns a server that is not started yet.
        num_servers: initial number of servers.
        drain_grace_s: maximum time that a removed server may keep its sessions.
        count_sessions: returns the number of sessions of the server with a key.
    """

    def __init__(
        self,
        make_server: Callable[[], LocalServer],
        num_servers: int,
        drain_grace_s: float,
        count_sessions: Callable[[str], int],
    ) -> None:
        self._make_server = make_server
        self._num_servers = num_servers
        self._drain_grace_s = drain_grace_s
        self._count_sessions = count_sessions
        self._slots: dict[str, _ServerSlot] = {}
        self._supervisors: dict[str, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)
        self._publish: Publish | None = None
        # Dedicated threads, because the kernel kills a child when the thread that started it exits.
        self._threads = ThreadPoolExecutor(_MAX_PARALLEL_STARTS, "ludus-gateway-servers")
        self._has_started = False
        self._failure: asyncio.Future[None] | None = None

    @property
    def num_servers(self) -> int:
        """Number of servers that listen and are not leaving."""
        return sum(slot.endpoint is not None for slot in self._staying_slots())

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running servers, by key."""
        servers = {key: slot.server for key, slot in self._slots.items()}
        return {
            key: server.pid for key, server in servers.items() if server is not None and server.pid
        }

    async def watch(self, publish: Publish) -> None:
        """Run the servers, and publish those that listen, until cancelled.

        Raises:
            UserError: the first server refused its target, options or arguments.
        """
        self._publish = publish
        self._failure = asyncio.get_running_loop().create_future()
        self.scale(self._num_servers)
        await self._failure

    def scale(self, num_servers: int) -> None:
        """Change the number of servers; surplus servers with the fewest sessions leave.

        Raises:
            ConfigError: the number is negative.
        """
        if num_servers < 0:
            raise ConfigError(f"the number of servers must be 0 or more, got {num_servers}")
        self._num_servers = num_servers
        staying = self._staying_slots()
        for _ in range(num_servers - len(staying)):
            slot = _ServerSlot(f"server-{next(self._numbers)}")
            self._slots[slot.key] = slot
            self._supervisors[slot.key] = asyncio.create_task(self._supervise(slot))
        by_load = sorted(staying, key=lambda slot: self._count_sessions(slot.key))
        for slot in by_load[: max(len(staying) - num_servers, 0)]:
            slot.is_leaving = True
        self._publish_listening()

    async def close(self) -> None:
        """Stop every server."""
        for task in self._supervisors.values():
            task.cancel()
        await asyncio.gather(*self._supervisors.values(), return_exceptions=True)
        self._threads.shutdown(wait=False)

    def _staying_slots(self) -> list[_ServerSlot]:
        return [slot for slot in self._slots.values() if not slot.is_leaving]

    def _publish_listening(self) -> None:
        if self._publish is None or not self._has_started:
            return
        self._publish(
            [
                _current_endpoint(slot, slot.endpoint)
                for slot in self._slots.values()
                if slot.endpoint is not None
            ]
        )

    async def _supervise(self, slot: _ServerSlot) -> None:
        """Run servers in the slot until the slot has left."""
        loop = asyncio.get_running_loop()
        pauses = doubling(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
        try:
            while not slot.is_leaving:
                started_s = loop.time()
                if await self._start(slot):
                    await self._watch_slot(slot)
                if slot.is_leaving:
                    break
                if loop.time() - started_s > _STABLE_AFTER_S:
                    pauses = doubling(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
                await asyncio.sleep(next(pauses))
        finally:
            slot.endpoint = None
            del self._slots[slot.key]
            self._supervisors.pop(slot.key, None)
            self._publish_listening()
            await self._stop(slot)

    async def _start(self, slot: _ServerSlot) -> bool:
        """Start a server in the slot; return whether it listens."""
        slot.server = server = self._make_server()
        starting = asyncio.get_running_loop().run_in_executor(self._threads, server.start)
        try:
            addresses = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread continues, so stop the server that it may still start.
            while not starting.done():
                server.stop()
                await asyncio.wait([starting], timeout=0.2)
            raise
        except LudusError as error:
            self._handle_failure(error)
            return False
        slot.endpoint = ServerEndpoint(slot.key, addresses.grpc, addresses.http)
        self._has_started = True
        self._publish_listening()
        return True

    def _handle_failure(self, error: LudusError) -> None:
        assert self._failure is not None, "`watch` has started"
        if isinstance(error, UserError) and not self._has_started:
            if not self._failure.done():
                self._failure.set_exception(error)
        else:
            _log.error("cannot start an environment server: %s", error)

    async def _watch_slot(self, slot: _ServerSlot) -> None:
        """Wait until the slot's server has died, or may be stopped."""
        loop = asyncio.get_running_loop()
        stop_at_s = empty_since_s = 0.0
        server = slot.server
        assert server is not None, "the server was started"
        while server.is_running:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            if not slot.is_leaving:
                continue
            now_s = loop.time()
            stop_at_s = stop_at_s or now_s + self._drain_grace_s
            is_used = self._count_sessions(slot.key) > 0
            empty_since_s = 0.0 if is_used else empty_since_s or now_s
            is_empty = empty_since_s and now_s - empty_since_s > _EMPTY_FOR_S
            if is_empty or now_s > stop_at_s:
                return
        _log.warning("environment server %s died; starting another one", slot.key)
        slot.endpoint = None
        self._publish_listening()

    async def _stop(self, slot: _ServerSlot) -> None:
        server = slot.server
        if server is not None and server.is_running:
            stopping = asyncio.get_running_loop().run_in_executor(self._threads, server.stop)
            await asyncio.shield(stopping)


def _current_endpoint(slot: _ServerSlot, endpoint: ServerEndpoint) -> ServerEndpoint:
    if not slot.is_leaving:
        return endpoint
    return replace(endpoint, is_ready=False, is_terminating=True)
