"""The server's side of its fork server: orders workers and hears of their ends.

    start() --order and socket--> fork server --fork--> worker
    on_exit <--report------------ fork server

A fork server that dies is restarted with the next worker that is wanted. Its workers live
on as orphans: nobody will tell how they end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from ludus.env.sandbox.confine import Sandbox
from ludus.env.sandbox.worker_resources import filter_variables
from ludus.env.targets.importable import FactoryName
from ludus.env.workers.protocol import (
    ORDER,
    REPORT,
    ForkServerSetup,
    OrderKind,
    ReportKind,
    WorkerLimits,
    kill_group,
    make_frame,
)
from ludus.proto.errors import ConfigError, UnavailableError

_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 3.0
_BUSY_PAUSE_S = 0.002


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker process ended."""

    status: int
    """As `os.wait` has it."""
    cpu_s: float
    refusal: str = ""
    """Why there was none to begin with."""


@dataclass(slots=True, eq=False)
class EnvWorkerProcess:
    """A worker process as the fork server knows it."""

    id: int
    on_exit: Callable[[WorkerExit], None]
    """Told how it ended, unless its fork server has died."""
    pid: int | None = None
    """Known a moment after it was ordered."""
    is_orphan: bool = False
    """Its fork server has died."""


class ForkServerClient:
    """Starts the fork server when it is needed, and talks to it; belongs to one event loop.

    Args:
        name: the environment factory of all workers.
        limits: for each worker.
        sandbox: what each worker may do.
        pass_env: environment variables that workers get beside the harmless ones.
    """

    def __init__(
        self,
        name: FactoryName,
        limits: WorkerLimits,
        sandbox: Sandbox,
        pass_env: Iterable[str] = (),
    ) -> None:
        self.pid: int | None = None
        """Of the latest fork server."""
        self._setup = ForkServerSetup(name, list(sys.path), limits, sandbox, [])
        self._variables = filter_variables(os.environ, pass_env)
        self._link: _ForkServerProcess | None = None
        self._starting = asyncio.Lock()

    async def start(self, process: EnvWorkerProcess, num_threads: int) -> socket.socket:
        """The server's end of the connection to a new worker.

        Raises:
            ConfigError: the environment's module cannot be imported.
            UnavailableError: there is no fork server to be had now.
        """
        return await self._order(OrderKind.START, process, num_threads)

    async def describe(self, process: EnvWorkerProcess, check_ms: int) -> socket.socket:
        """The server's end of the connection to a worker that describes the environment."""
        return await self._order(OrderKind.DESCRIBE, process, check_ms)

    async def import_all(self, modules: list[str]) -> None:
        """Have the fork server import these modules, now and after a restart."""
        self._setup = dataclasses.replace(self._setup, modules=modules)
        if modules and self._link is not None:
            names = orjson.dumps(modules)
            await self._link.send(ORDER.pack(OrderKind.IMPORT, len(names), 0))
            await self._link.send(names)

    def kill(self, process: EnvWorkerProcess) -> None:
        """Have the worker killed in a moment, with what it has started itself."""
        link = self._link
        if link is not None and process.id in link.processes:
            link.send_soon(ORDER.pack(OrderKind.KILL, process.id, 0))
        elif process.is_orphan and process.pid is not None:
            kill_group(process.pid)  # nobody else is left to do it

    async def stop(self) -> None:
        """End the fork server and all its workers."""
        async with self._starting:
            if self._link is not None:
                await self._link.stop()

    async def _order(
        self, kind: OrderKind, process: EnvWorkerProcess, argument: int
    ) -> socket.socket:
        link = await self._live_link()
        try:
            return await self._order_from(link, kind, process, argument)
        except UnavailableError:  # it died unnoticed; no reason to refuse what a new one can do
            link = await self._live_link()
            return await self._order_from(link, kind, process, argument)

    async def _order_from(
        self, link: _ForkServerProcess, kind: OrderKind, process: EnvWorkerProcess, argument: int
    ) -> socket.socket:
        ours, theirs = socket.socketpair()
        process.is_orphan = False
        link.processes[process.id] = process
        try:
            await link.send(ORDER.pack(kind, process.id, argument), theirs)
        except BaseException:
            link.processes.pop(process.id, None)
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    async def _live_link(self) -> _ForkServerProcess:
        async with self._starting:
            if self._link is None or self._link.is_broken:
                link = _ForkServerProcess(self._setup, self._variables)
                self.pid = link.pid
                await link.wait_until_ready()
                self._link = link
            return self._link


class _ForkServerProcess:
    """One fork server and the socket to it."""

    def __init__(self, setup: ForkServerSetup, variables: Mapping[str, str]) -> None:
        self.processes: dict[int, EnvWorkerProcess] = {}
        """Workers that live or are ordered, by id."""
        self.is_broken = False
        self._orders, theirs = socket.socketpair()
        self._orders.setblocking(False)
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._setup = setup
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ludus.env.workers.forkserver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=variables,
                # A terminal's Ctrl-C is for the server, which then stops its workers.
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.pid = self._process.pid

    async def wait_until_ready(self) -> None:
        """Wait until the environment's module is imported there."""
        # A duplicate, because a socket that a transport reads is not to be written directly.
        reader, self._transport = await asyncio.open_unix_connection(sock=self._orders.dup())
        try:
            await self.send(make_frame(self._setup.to_json()))
            async with asyncio.timeout(_START_TIMEOUT_S):
                kind, _, _, size, _ = REPORT.unpack(await reader.readexactly(REPORT.size))
                failure = await reader.readexactly(size)
        except TimeoutError:
            await self.stop()
            raise UnavailableError(
                "expected the environment's module to be imported within"
                f" {_START_TIMEOUT_S:g} s, but it was not"
            ) from None
        except (asyncio.IncompleteReadError, OSError):
            await self.stop()
            raise UnavailableError(
                "the fork server ended while it imported the environment's"
                f" module (exit code {self._process.returncode}); its output says more"
            ) from None
        if kind == ReportKind.FAILED:
            await self.stop()
            raise ConfigError(failure.decode(errors="replace"))
        self._start(self._read_reports(reader))

    async def send(self, order: bytes, connection: socket.socket | None = None) -> None:
        """Send an order, with a socket where it asks for one.

        Raises:
            UnavailableError: the fork server is dead.
        """
        descriptors = [] if connection is None else [connection.fileno()]
        async with self._sending:
            while order:
                try:
                    sent = socket.send_fds(self._orders, [order], descriptors)
                except BlockingIOError:
                    await asyncio.sleep(_BUSY_PAUSE_S)
                except OSError as error:
                    self._notice_end()
                    raise UnavailableError(
                        f"the fork server has ended: {error}; try again",
                        retry_after_s=1.0,
                    ) from None
                else:
                    order, descriptors = order[sent:], []

    def send_soon(self, order: bytes) -> None:
        """Send without a wait; to a dead fork server, in vain."""
        self._start(self._send_or_drop(order))

    async def stop(self) -> None:
        """End the process, and with it its workers."""
        self.is_broken = True
        self._orders.close()
        self._transport.close()
        deadline_s = asyncio.get_running_loop().time() + _STOP_TIMEOUT_S
        while self._process.poll() is None:
            if asyncio.get_running_loop().time() > deadline_s:
                _log.warning("the fork server did not end; it is killed")
                self._process.kill()
                self._process.wait()
                for process in self.processes.values():
                    if process.pid is not None:
                        kill_group(process.pid)
                break
            await asyncio.sleep(_BUSY_PAUSE_S)
        self._end()

    async def _send_or_drop(self, order: bytes) -> None:
        with contextlib.suppress(UnavailableError):
            await self.send(order)

    async def _read_reports(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                report = REPORT.unpack(await reader.readexactly(REPORT.size))
                kind, worker_id, pid, status, cpu_s = report
                if kind == ReportKind.STARTED and worker_id in self.processes:
                    self.processes[worker_id].pid = pid
                elif kind == ReportKind.EXITED and worker_id in self.processes:
                    self.processes.pop(worker_id).on_exit(WorkerExit(status, cpu_s))
                elif kind == ReportKind.REFUSED:
                    why = (await reader.readexactly(status)).decode(errors="replace")
                    if worker_id in self.processes:
                        self.processes.pop(worker_id).on_exit(WorkerExit(0, 0.0, why))
        self._notice_end()
        while self._process.poll() is None:
            await asyncio.sleep(_BUSY_PAUSE_S)

    def _notice_end(self) -> None:
        if not self.is_broken:
            _log.error("the fork server (pid %d) has ended", self.pid)
            self._end()

    def _end(self) -> None:
        self.is_broken = True
        self._orders.close()
        self._transport.close()
        for process in self.processes.values():
            process.is_orphan = True
        self.processes = {}

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
