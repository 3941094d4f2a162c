"""The server's client of its fork server, which sends orders and receives reports.

    start() --order and socket--> fork server --fork--> worker
    on_exit <--report------------ fork server

A fork server that dies is restarted for the next worker. Its workers continue as orphans, and
their exit status is never known.
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
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ludus.env.runtime import make_module_command
from ludus.env.sandbox.confine import Sandbox
from ludus.env.sandbox.processes import kill_group
from ludus.env.sandbox.worker_resources import filter_variables
from ludus.env.targets.targets import TargetFactory
from ludus.env.workers.output import MAX_SERVER_BYTES, OutputAllowance, WorkerOutput
from ludus.env.workers.protocol import (
    ORDER_STRUCT,
    REPORT_STRUCT,
    ForkServerSetup,
    OrderKind,
    ReportKind,
    WorkerLimits,
    make_frame,
)
from ludus.proto.errors import ConfigError, UnavailableError

_log = logging.getLogger(__name__)

_FORK_SERVER = "ludus.env.workers.forkserver"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 3.0
_BUSY_PAUSE_S = 0.002
_OUTPUT_TIMEOUT_S = 0.5
"""Time limit for the last output of processes that have ended."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The exit of a worker process."""

    status: int
    """Status in the encoding of `os.wait`."""
    cpu_s: float
    refusal: str = ""
    """Reason why no process could be forked; "" if one was."""


@dataclass(slots=True, eq=False)
class EnvWorkerProcess:
    """A worker process of a fork server."""

    id: int
    on_exit: Callable[[WorkerExit], None]
    """Called when the process has exited, unless its fork server has died."""
    pid: int | None = None
    """Process id, set soon after the order."""
    is_orphan: bool = False
    """True if its fork server has died."""


class ForkServerClient:
    """Starts the fork server on demand and sends it orders; belongs to one event loop.

    Args:
        pass_env: names of environment variables that workers receive in addition to the default
            ones.
    """

    def __init__(
        self,
        factory: TargetFactory,
        limits: WorkerLimits,
        sandbox: Sandbox,
        pass_env: Iterable[str],
    ) -> None:
        self.pid: int | None = None
        """Process id of the latest fork server."""
        self._setup = ForkServerSetup(factory, _list_search_paths(), limits, sandbox, [])
        self._variables = filter_variables(os.environ, pass_env)
        self._fork_server: _ForkServerProcess | None = None
        self._start_lock = asyncio.Lock()
        self._output_allowance = OutputAllowance(MAX_SERVER_BYTES)

    async def start(
        self, order_kind: OrderKind, process: EnvWorkerProcess, argument: int
    ) -> socket.socket:
        """Start a worker and return the server's end of its connection.

        Args:
            order_kind: START or DESCRIBE.
            argument: number of threads, or the time of the determinism check in milliseconds.

        Raises:
            ConfigError: the environment's module cannot be imported.
            UnavailableError: the fork server cannot be started; a later attempt may succeed.
        """
        fork_server = await self._ensure_fork_server()
        try:
            return await fork_server.start_worker(order_kind, process, argument)
        except UnavailableError:  # the fork server had died
            new_fork_server = await self._ensure_fork_server()
            return await new_fork_server.start_worker(order_kind, process, argument)

    async def import_all(self, modules: list[str]) -> None:
        """Make the fork server import these modules, now and after each restart."""
        self._setup = dataclasses.replace(self._setup, modules=modules)
        if modules and self._fork_server is not None:
            modules_json = orjson.dumps(modules)
            await self._fork_server.send(ORDER_STRUCT.pack(OrderKind.IMPORT, len(modules_json), 0))
            await self._fork_server.send(modules_json)

    def kill(self, process: EnvWorkerProcess) -> None:
        """Order the fork server to kill a worker and its child processes."""
        fork_server = self._fork_server
        if fork_server is not None and process.id in fork_server.processes:
            fork_server.send_soon(ORDER_STRUCT.pack(OrderKind.KILL, process.id, 0))
        elif process.is_orphan and process.pid is not None:
            kill_group(process.pid)  # its fork server has died

    async def stop(self) -> None:
        """Stop the fork server and all its workers."""
        async with self._start_lock:
            if self._fork_server is not None:
                await self._fork_server.stop()

    async def _ensure_fork_server(self) -> _ForkServerProcess:
        async with self._start_lock:
            if self._fork_server is None or self._fork_server.is_broken:
                fork_server = _ForkServerProcess(
                    self._setup, self._variables, self._output_allowance
                )
                self.pid = fork_server.pid
                await fork_server.wait_until_ready()
                self._fork_server = fork_server
            return self._fork_server


class _ForkServerProcess:
    """A fork server process and the socket to it."""

    def __init__(
        self,
        setup: ForkServerSetup,
        variables: Mapping[str, str],
        output_allowance: OutputAllowance,
    ) -> None:
        self.processes: dict[int, EnvWorkerProcess] = {}
        """Live and ordered workers by id."""
        self.is_broken = False
        self._order_socket, remote_socket = socket.socketpair()
        self._order_socket.setblocking(False)
        self._send_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._setup = setup
        self._output_allowance = output_allowance
        self._outputs: set[WorkerOutput] = set()
        self._unread_descriptors: dict[int, int] = {}
        """Pipes with the output of workers whose process ids are not known yet, by worker."""
        self._output_descriptor, remote_descriptor = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*make_module_command(_FORK_SERVER), str(remote_socket.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=remote_descriptor,
                stderr=remote_descriptor,
                pass_fds=[remote_socket.fileno()],
                env=variables,
                # Ctrl-C in a terminal is for the server, which then stops its workers.
                start_new_session=True,
            )
        except BaseException:
            os.close(self._output_descriptor)
            raise
        finally:
            remote_socket.close()
            os.close(remote_descriptor)
        self.pid = self._process.pid

    async def wait_until_ready(self) -> None:
        """Wait until the environment's module is imported."""
        await self._read_output(self._output_descriptor, f"fork server {self.pid}")
        # A duplicate, because a socket that a transport reads must not be written directly.
        reader, self._transport = await asyncio.open_unix_connection(sock=self._order_socket.dup())
        try:
            await self.send(make_frame(orjson.dumps(self._setup)))
            async with asyncio.timeout(_START_TIMEOUT_S):
                report = await reader.readexactly(REPORT_STRUCT.size)
                report_kind, _, _, size, _ = REPORT_STRUCT.unpack(report)
                failure_text = await reader.readexactly(size)
        except TimeoutError:
            await self.stop()
            raise UnavailableError(
                f"the environment's module was not imported within {_START_TIMEOUT_S:g} s"
            ) from None
        except (asyncio.IncompleteReadError, OSError):
            await self.stop()
            raise UnavailableError(
                "the fork server exited while it imported the environment's module"
                f" (exit code {self._process.returncode}); see its output"
            ) from None
        if report_kind == ReportKind.FAILED:
            await self.stop()
            raise ConfigError(failure_text.decode(errors="replace"))
        self._start_task(self._read_reports(reader))

    async def start_worker(
        self, order_kind: OrderKind, process: EnvWorkerProcess, argument: int
    ) -> socket.socket:
        """Send the order to start a worker; return the server's end of its connection."""
        local_socket, remote_socket = socket.socketpair()
        self._unread_descriptors[process.id], remote_output_descriptor = os.pipe()
        process.is_orphan = False
        self.processes[process.id] = process
        try:
            order = ORDER_STRUCT.pack(order_kind, process.id, argument)
            await self.send(order, (remote_socket.fileno(), remote_output_descriptor))
        except BaseException:
            self.processes.pop(process.id, None)
            self._close_unread_output(process.id)
            local_socket.close()
            raise
        finally:
            remote_socket.close()
            os.close(remote_output_descriptor)
        return local_socket

    async def send(self, order: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send an order, with the descriptors that the order needs."""
        async with self._send_lock:
            while order:
                try:
                    num_sent = socket.send_fds(self._order_socket, [order], descriptors)
                except BlockingIOError:
                    await asyncio.sleep(_BUSY_PAUSE_S)
                except OSError as error:
                    self._handle_death()
                    raise UnavailableError(
                        f"the fork server has died: {error}; try again", retry_after_s=1.0
                    ) from None
                else:
                    order, descriptors = order[num_sent:], ()

    def send_soon(self, order: bytes) -> None:
        """Send an order without waiting; an order to a dead fork server is dropped."""
        self._start_task(self._try_to_send(order))

    async def stop(self) -> None:
        """Stop the fork server, and with it its workers."""
        self.is_broken = True
        self._order_socket.close()
        self._transport.close()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._wait_for_exit()
        except TimeoutError:
            _log.warning("the fork server did not exit and is killed")
            self._process.kill()
            self._process.wait()
            for process in self.processes.values():
                if process.pid is not None:
                    kill_group(process.pid)
        self._disconnect()
        await self._close_outputs()

    async def _read_output(self, descriptor: int, name: str) -> None:
        output = WorkerOutput(name, self._output_allowance)
        self._outputs.add(output)
        output.on_close = self._outputs.discard
        await output.read_from(descriptor)

    def _close_unread_output(self, worker_id: int) -> None:
        descriptor = self._unread_descriptors.pop(worker_id, None)
        if descriptor is not None:
            os.close(descriptor)

    async def _close_outputs(self) -> None:
        """Wait for the last output; a process that survives its fork server may keep a pipe."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OUTPUT_TIMEOUT_S):
                while self._outputs:
                    await asyncio.sleep(_BUSY_PAUSE_S)
        for output in list(self._outputs):
            output.close()

    async def _wait_for_exit(self) -> None:
        while self._process.poll() is None:
            await asyncio.sleep(_BUSY_PAUSE_S)

    async def _try_to_send(self, order: bytes) -> None:
        with contextlib.suppress(UnavailableError):
            await self.send(order)

    async def _read_reports(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                report = REPORT_STRUCT.unpack(await reader.readexactly(REPORT_STRUCT.size))
                report_kind, worker_id, pid, status, cpu_s = report
                if report_kind == ReportKind.STARTED and worker_id in self.processes:
                    self.processes[worker_id].pid = pid
                    # The worker may have printed before this report arrived.
                    descriptor = self._unread_descriptors.pop(worker_id)
                    await self._read_output(descriptor, f"worker {pid}")
                elif report_kind == ReportKind.EXITED and worker_id in self.processes:
                    self.processes.pop(worker_id).on_exit(WorkerExit(status, cpu_s))
                elif report_kind == ReportKind.REFUSED:
                    reason = (await reader.readexactly(status)).decode(errors="replace")
                    self._close_unread_output(worker_id)
                    if worker_id in self.processes:
                        self.processes.pop(worker_id).on_exit(WorkerExit(0, 0.0, reason))
        self._handle_death()
        await self._wait_for_exit()

    def _handle_death(self) -> None:
        if not self.is_broken:
            _log.error("the fork server (pid %d) has died", self.pid)
            self._disconnect()

    def _disconnect(self) -> None:
        self.is_broken = True
        self._order_socket.close()
        self._transport.close()
        for process in self.processes.values():
            process.is_orphan = True
            self._close_unread_output(process.id)
        self.processes = {}

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _list_search_paths() -> list[str]:
    """Return the folders from which this process imports modules, as far as JSON allows."""
    paths = []
    for path in sys.path:
        with contextlib.suppress(UnicodeEncodeError):
            path.encode()
            paths.append(path)
    return paths
