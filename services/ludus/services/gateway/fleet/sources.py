"""Servers at fixed addresses, and servers that the gateway runs on this machine.

    scale(n) --> a task supervises each server: start, watch, start again --publish--> Fleet

A server that dies is taken off the list at once, its sessions end with it, and another is
started in its place; failures in a row make the pauses longer. A server that is scaled away
is listed as terminating until it is empty or its grace is over.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ludus.env.backoff import doubling
from ludus.env.serving.subprocess import LocalServer
from ludus.proto.errors import ConfigError, LudusError, UserError
from ludus.services.gateway.fleet.endpoints import Endpoint, Publish

_log = logging.getLogger(__name__)

_WATCH_EACH_S = 0.2
_FIRST_BACKOFF_S = 0.2
_LAST_BACKOFF_S = 10.0
_STEADY_S = 10.0
"""A server that lived so long starts its successor without a pause."""
_MAX_PARALLEL_STARTS = 4
_EMPTY_FOR_S = 2.5
"""A leaving server is stopped after it was empty for so long: loads are polled each second."""


class StaticSource:
    """Servers at addresses that never change.

    Args:
        addresses: gRPC addresses, for example grpc://10.0.0.7:18000.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._endpoints = [Endpoint(address, address, "") for address in addresses]

    async def watch(self, publish: Publish) -> None:
        """Publish the addresses once."""
        publish(self._endpoints)
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Do nothing: nothing was started."""


@dataclass(slots=True, eq=False)
class _Child:
    """One slot for a server, and the server that is in it now."""

    key: str
    server: LocalServer | None = None
    endpoint: Endpoint | None = None
    """None while none listens."""
    is_leaving: bool = False


class SubprocessSource:
    """Servers of one environment, as processes of this machine.

    Args:
        make_server: a server that is not started yet.
        num_servers: how many to run at first.
        drain_grace_s: how long a server that is scaled away may finish its sessions.
        num_sessions_of: how many sessions the server of a key has.
    """

    def __init__(
        self,
        make_server: Callable[[], LocalServer],
        num_servers: int,
        drain_grace_s: float,
        num_sessions_of: Callable[[str], int],
    ) -> None:
        self._make_server = make_server
        self._num_wanted = num_servers
        self._drain_grace_s = drain_grace_s
        self._num_sessions_of = num_sessions_of
        self._children: dict[str, _Child] = {}
        self._supervising: dict[str, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)
        self._publish: Publish | None = None
        # Threads of its own: the kernel ends a child with the thread that started it.
        self._threads = ThreadPoolExecutor(_MAX_PARALLEL_STARTS, "ludus-gateway-servers")
        self._has_started = False
        self._failed: asyncio.Future[None] | None = None

    @property
    def num_servers(self) -> int:
        """Servers that listen and are not leaving."""
        return sum(one.endpoint is not None for one in self._staying())

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the servers that run, by key."""
        servers = {key: one.server for key, one in self._children.items()}
        return {key: one.pid for key, one in servers.items() if one is not None and one.pid}

    async def watch(self, publish: Publish) -> None:
        """Run the servers, and publish those that listen, for ever.

        Raises:
            UserError: the first server refused its target, options or arguments.
        """
        self._publish = publish
        self._failed = asyncio.get_running_loop().create_future()
        self.scale(self._num_wanted)
        await self._failed

    def scale(self, num_servers: int) -> None:
        """Run so many servers from now on; fewer lets the emptiest finish and leave.

        Raises:
            ConfigError: it is less than 0.
        """
        if num_servers < 0:
            raise ConfigError(f"expected 0 or more servers, got {num_servers}")
        self._num_wanted = num_servers
        staying = self._staying()
        for _ in range(num_servers - len(staying)):
            child = _Child(f"server-{next(self._numbers)}")
            self._children[child.key] = child
            self._supervising[child.key] = asyncio.create_task(self._supervise(child))
        by_load = sorted(staying, key=lambda one: self._num_sessions_of(one.key))
        for child in by_load[: max(len(staying) - num_servers, 0)]:
            child.is_leaving = True
        self._publish_listening()

    async def close(self) -> None:
        """Stop every server."""
        for task in self._supervising.values():
            task.cancel()
        await asyncio.gather(*self._supervising.values(), return_exceptions=True)
        self._threads.shutdown(wait=False)

    def _staying(self) -> list[_Child]:
        return [child for child in self._children.values() if not child.is_leaving]

    def _publish_listening(self) -> None:
        if self._publish is None or not self._has_started:
            return
        listening = [one for one in self._children.values() if one.endpoint is not None]
        self._publish([_seen(one) for one in listening])

    async def _supervise(self, child: _Child) -> None:
        """Run a server in the child's slot until the child has left."""
        loop = asyncio.get_running_loop()
        pauses = doubling(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
        try:
            while not child.is_leaving:
                started_s = loop.time()
                if await self._start(child):
                    await self._watch_one(child)
                if child.is_leaving:
                    break
                if loop.time() - started_s > _STEADY_S:
                    pauses = doubling(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
                await asyncio.sleep(next(pauses))
        finally:
            child.endpoint = None
            del self._children[child.key]
            self._supervising.pop(child.key, None)
            self._publish_listening()
            await self._stop(child)

    async def _start(self, child: _Child) -> bool:
        """True when the child's server listens."""
        child.server = server = self._make_server()
        starting = asyncio.get_running_loop().run_in_executor(self._threads, server.start)
        try:
            addresses = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread continues; what it starts must not be left behind.
            while not starting.done():
                server.stop()
                await asyncio.wait([starting], timeout=0.2)
            raise
        except LudusError as error:
            self._note_failure(error)
            return False
        child.endpoint = Endpoint(child.key, addresses.grpc, addresses.http)
        self._has_started = True
        self._publish_listening()
        return True

    def _note_failure(self, error: LudusError) -> None:
        assert self._failed is not None, "it is watched"
        if isinstance(error, UserError) and not self._has_started:
            if not self._failed.done():
                self._failed.set_exception(error)
        else:
            _log.error("an environment server did not start: %s", error)

    async def _watch_one(self, child: _Child) -> None:
        """Wait until the child's server has died, or may be stopped."""
        loop = asyncio.get_running_loop()
        must_leave_s = empty_since_s = 0.0
        server = child.server
        assert server is not None, "it was started"
        while server.is_running:
            await asyncio.sleep(_WATCH_EACH_S)
            if not child.is_leaving:
                continue
            now_s = loop.time()
            must_leave_s = must_leave_s or now_s + self._drain_grace_s
            is_used = self._num_sessions_of(child.key) > 0
            empty_since_s = 0.0 if is_used else empty_since_s or now_s
            is_empty = empty_since_s and now_s - empty_since_s > _EMPTY_FOR_S
            if is_empty or now_s > must_leave_s:
                return
        _log.warning("environment server %s died; another is started", child.key)
        child.endpoint = None
        self._publish_listening()

    async def _stop(self, child: _Child) -> None:
        server = child.server
        if server is not None and server.is_running:
            stopping = asyncio.get_running_loop().run_in_executor(self._threads, server.stop)
            await asyncio.shield(stopping)


def _seen(child: _Child) -> Endpoint:
    endpoint = child.endpoint
    assert endpoint is not None, "it listens"
    if not child.is_leaving:
        return endpoint
    return Endpoint(
        endpoint.key,
        endpoint.grpc_address,
        endpoint.http_address,
        is_ready=False,
        is_terminating=True,
    )
