"""`python -m ludus.env.workers.forkserver FD`: the process that forks workers.

    server --start, with a socket--> fork server --fork--> worker <--calls, replies--> server
    server <--started, exited------- fork server              (confined before it builds)

It imports the environment's module once and builds nothing, so that forks are fast, memory is
shared, and no thread is lost in a fork. The fork server is the parent of all orphans of its
workers, including those in other process sessions, and kills them with their worker. When its
server exits, it kills everything. It never waits for an environment, so a worker that hangs does
not delay others.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
from pydantic import TypeAdapter

from ludus.env.sandbox.confine import SandboxError, confine, describe_missing_layers
from ludus.env.sandbox.kernel import LayerUnavailableError
from ludus.env.sandbox.namespaces import (
    ForkedProcess,
    adopt_orphans,
    enter_namespaces,
    find_namespace_fault,
    fork_into_namespaces,
)
from ludus.env.sandbox.processes import (
    find_outer_pid,
    hide_process,
    kill_child_processes,
    kill_group,
    list_child_pids,
    show_process,
)
from ludus.env.sandbox.worker_resources import WORKER_PID_VARIABLE, list_code_paths, remove_folder
from ludus.env.text.terminal import log_to_stderr
from ludus.env.workers import child
from ludus.env.workers.protocol import (
    ORDER_STRUCT,
    REPORT_STRUCT,
    ForkServerSetup,
    OrderKind,
    ReportKind,
    WorkerLimits,
    make_frame,
    read_frame,
)
from ludus.proto.errors import UserError

_log = logging.getLogger(__name__)

_MAX_FILE_BYTES = 1 << 30
_MAX_FAILURE_CHARS = 2_000
_FAILED_EXIT_CODE = 70
_OOM_SCORE = b"500"
"""Score that makes the kernel kill workers before their server when memory runs out."""


class ForkServer:
    """Forks workers on orders from the control socket, and reports their exits."""

    def __init__(self, control: socket.socket, setup: ForkServerSetup) -> None:
        self._control = control
        self._setup = setup
        without_sockets = not setup.factory.needs_network
        self._sandbox = sandbox = replace(setup.sandbox, without_sockets=without_sockets)
        self._code_paths = list_code_paths(Path(sandbox.folder))
        self._workers: dict[int, ForkedProcess] = {}
        """Live workers by worker id."""
        with contextlib.suppress(OSError, AttributeError):  # only Linux supports these
            adopt_orphans()
            hide_process()
        self._import_child_pids = list_child_pids()
        """Ids of processes that the import of the environment started; they must stay alive."""
        self._namespace_fault = find_namespace_fault(without_network=sandbox.without_network)
        """Reason why workers share this process's namespaces; "" if each gets separate ones."""
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Execute orders until the server disconnects, then kill all workers."""
        events = select.poll()
        events.register(self._control, select.POLLIN)
        events.register(self._wake_reader, select.POLLIN)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._report(ReportKind.READY)
            while True:
                for descriptor, _ in events.poll():
                    if descriptor == self._wake_reader.fileno():
                        self._reap_workers()
                    else:
                        self._execute_order()
        for process in self._workers.values():
            kill_group(process.pid)
        for process in self._workers.values():
            os.waitpid(process.pid, 0)
        kill_child_processes()
        remove_folder(Path(self._sandbox.folder))

    def _execute_order(self) -> None:
        """Execute the next order.

        Raises:
            ConnectionResetError: the server has disconnected.
        """
        order_bytes, descriptors, _, _ = socket.recv_fds(self._control, ORDER_STRUCT.size, 2)
        if len(order_bytes) < ORDER_STRUCT.size:
            raise ConnectionResetError("the server has disconnected")
        order_kind, worker_id, order_argument = ORDER_STRUCT.unpack(order_bytes)
        if order_kind == OrderKind.KILL:
            if worker_id in self._workers:
                kill_group(self._workers[worker_id].pid)
        elif order_kind == OrderKind.IMPORT:
            _import_all(orjson.loads(_UnbufferedStream(self._control).read(worker_id)))
            self._code_paths = list_code_paths(Path(self._sandbox.folder))
        else:
            connection_descriptor, output_descriptor = descriptors
            with socket.socket(fileno=connection_descriptor) as connection:
                try:
                    self._start_worker(
                        connection, output_descriptor, order_kind, worker_id, order_argument
                    )
                finally:
                    os.close(output_descriptor)

    def _start_worker(
        self,
        connection: socket.socket,
        output_descriptor: int,
        order_kind: int,
        worker_id: int,
        order_argument: int,
    ) -> None:
        try:
            if self._namespace_fault:
                process = ForkedProcess(os.fork())
            else:
                process = fork_into_namespaces(without_network=self._sandbox.without_network)
        except (OSError, LayerUnavailableError) as error:  # a later attempt may succeed
            _log.error("a worker could not be forked: %s", error)
            reason = str(error).encode()
            self._report(ReportKind.REFUSED, worker_id, status=len(reason))
            self._control.sendall(reason)
            return
        if process.pid == 0:
            self._run_worker(connection, output_descriptor, order_kind, worker_id, order_argument)
        self._workers[worker_id] = process
        self._report(ReportKind.STARTED, worker_id, process.pid)

    def _run_worker(
        self,
        connection: socket.socket,
        output_descriptor: int,
        order_kind: int,
        worker_id: int,
        order_argument: int,
    ) -> None:
        """Run the worker in this forked process. Never returns."""
        exit_code = _FAILED_EXIT_CODE
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for standard_descriptor in (1, 2):
                os.dup2(output_descriptor, standard_descriptor)
            os.close(output_descriptor)
            for inherited_socket in (self._control, self._wake_reader, self._wake_writer):
                inherited_socket.close()
            connection.set_inheritable(False)
            os.setsid()
            with contextlib.suppress(OSError, AttributeError):
                show_process()  # otherwise /proc/self is not writable; `confine` hides it again
            _apply_limits(self._setup.limits)
            random.seed()
            np.random.seed()
            self._confine_worker(connection, order_kind, worker_id)
            if order_kind == OrderKind.DESCRIBE:
                child.send_description(connection, self._setup.factory, order_argument / 1000)
            else:
                child.serve(connection, self._setup.factory, order_argument)
            exit_code = 0
        except BaseException:  # noqa: BLE001 - the process exits here, with its traceback
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(exit_code)

    def _confine_worker(self, connection: socket.socket, order_kind: int, worker_id: int) -> None:
        outer_pid = find_outer_pid()
        os.environ[WORKER_PID_VARIABLE] = str(outer_pid)
        if self._namespace_fault:
            with contextlib.suppress(OSError, AttributeError):
                adopt_orphans()  # so that the worker's descendants can be killed when it exits
        else:
            enter_namespaces()
        missing_layers = confine(
            self._sandbox, worker_id, outer_pid, self._code_paths, self._namespace_fault
        )
        if order_kind == OrderKind.DESCRIBE:
            report = {layer.value: reason for layer, reason in missing_layers.items()}
            connection.sendall(make_frame(orjson.dumps(report)))
        elif self._sandbox.list_refused_layers(missing_layers):
            raise SandboxError(f"the sandbox lacks {describe_missing_layers(missing_layers)}")

    def _reap_workers(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)
        for worker_id, process in list(self._workers.items()):
            exit_info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if exit_info is None:
                continue
            # Kill the worker's group before its id can be reused.
            kill_group(process.pid)
            _, status, usage = os.wait4(process.pid, 0)
            del self._workers[worker_id]
            cpu_s = usage.ru_utime + usage.ru_stime
            self._report(ReportKind.EXITED, worker_id, process.pid, status, cpu_s)
        self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill orphans of workers. Their own children then become children of this process."""
        worker_pids = {
            pid for process in self._workers.values() for pid in (process.pid, process.keeper_pid)
        }
        for pid in list_child_pids() - worker_pids - self._import_child_pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)  # otherwise reaped at the next SIGCHLD

    def _report(
        self, kind: ReportKind, worker_id: int = 0, pid: int = 0, status: int = 0, cpu_s: float = 0
    ) -> None:
        self._control.sendall(REPORT_STRUCT.pack(kind, worker_id, pid, status, cpu_s))


def main(descriptor: int) -> None:
    """Serve until the server disconnects."""
    # The server may have inherited that the kernel reaps children, and so has this process.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log_to_stderr(logging.INFO)
    control = socket.socket(fileno=descriptor)
    setup_json = read_frame(_UnbufferedStream(control))
    if setup_json is None:
        return
    setup = TypeAdapter(ForkServerSetup).validate_json(setup_json)
    sys.path[:] = setup.sys_path
    try:
        setup.factory.load()
    except BaseException as error:  # noqa: BLE001 - the boundary to third-party code
        is_user_error = isinstance(error, UserError)
        message = str(error) if is_user_error else f"{type(error).__name__}: {error}"
        reason = message[:_MAX_FAILURE_CHARS].encode()
        control.sendall(REPORT_STRUCT.pack(ReportKind.FAILED, 0, 0, len(reason), 0.0) + reason)
        return
    if threading.active_count() > 1:
        _log.warning(
            "importing the environment started %d threads, which do not exist in workers",
            threading.active_count() - 1,
        )
    _import_all(setup.modules)
    ForkServer(control, setup).run()


class _UnbufferedStream:
    """A stream that reads from a socket exactly the requested bytes, never ahead."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def read(self, size: int, /) -> bytes:
        content = b""
        while len(content) < size and (chunk := self._connection.recv(size - len(content))):
            content += chunk
        return content


def _import_all(modules: list[str]) -> None:
    """Import modules once, so that workers share them."""
    for module_name in modules:
        with contextlib.suppress(Exception):  # the worker will report the error
            importlib.import_module(module_name)
    gc.collect()
    gc.freeze()  # otherwise the first collection in a worker copies all shared memory


def _apply_limits(limits: WorkerLimits) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _set_limit(resource.RLIMIT_FSIZE, _MAX_FILE_BYTES)
    if limits.cpu_s > 0:
        seconds = max(1, round(limits.cpu_s))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with contextlib.suppress(OSError):  # only Linux has the file
        Path("/proc/self/oom_score_adj").write_bytes(_OOM_SCORE)
    if limits.memory_mb > 0:
        # The server watches the resident memory. This limit stops faster growth than the server
        # notices, with room for memory that is reserved and never used.
        data_mb = child.measure_memory_mb(find_outer_pid(), child.DATA_COLUMN)
        _set_limit(resource.RLIMIT_DATA, round((data_mb + 2 * limits.memory_mb + 256) * 2**20))


def _set_limit(resource_id: int, limit: int) -> None:
    hard_limit = resource.getrlimit(resource_id)[1]
    limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
    resource.setrlimit(resource_id, (limit, limit))


if __name__ == "__main__":
    main(int(sys.argv[1]))
