"""`python -m ludus.env.workers.forkserver FD`: the process that forks workers.

    server --start, with a socket--> fork server --fork--> worker <--calls, replies--> server
    server <--started, exited------- fork server              (confined before it builds anything)

It imports the environment's module once and builds nothing, so that forks are fast, memory is
shared, and no thread is lost in a fork. It is the parent of all orphans of its workers, including
those in other process sessions, and kills them with their worker. When its server exits, it kills
everything. It never waits for an environment, so a worker that hangs does not delay others.
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
    child_pids,
    hide_process,
    kill_group,
    pid_outside_namespace,
    show_process,
)
from ludus.env.sandbox.worker_resources import WORKER_PID_VARIABLE, code_paths, remove_folder
from ludus.env.workers import child as worker
from ludus.env.workers.protocol import (
    ORDER,
    REPORT,
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
        self._sandbox = sandbox = setup.sandbox
        self._code = code_paths(Path(sandbox.folder))
        self._workers: dict[int, ForkedProcess] = {}
        """Live workers by worker id."""
        with contextlib.suppress(OSError, AttributeError):  # only Linux supports these
            adopt_orphans()
            hide_process()
        self._own_children = child_pids()
        """Processes that importing the environment started; they belong to no worker."""
        self._sharing_reason = find_namespace_fault(without_network=sandbox.without_network)
        """Reason why workers share this process's namespaces; "" if each worker gets its own."""
        self._wake, wake_writer = socket.socketpair()
        self._wake.setblocking(False)
        wake_writer.setblocking(False)
        self._wake_writer = wake_writer
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Carry out orders until the server disconnects, then kill all workers."""
        events = select.poll()
        events.register(self._control, select.POLLIN)
        events.register(self._wake, select.POLLIN)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._report(ReportKind.READY)
            while True:
                for descriptor, _ in events.poll():
                    if descriptor == self._wake.fileno():
                        self._reap()
                    elif not self._carry_out_order():
                        break
                else:
                    continue
                break
        for forked in self._workers.values():
            kill_group(forked.pid)
        for forked in self._workers.values():
            os.waitpid(forked.pid, 0)
        while orphans := child_pids():
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
        remove_folder(Path(self._sandbox.folder))

    def _carry_out_order(self) -> bool:
        """Carry out the next order; return False if the server has disconnected."""
        order, descriptors, _, _ = socket.recv_fds(self._control, ORDER.size, 1)
        if len(order) < ORDER.size:
            return False
        kind, worker_id, argument = ORDER.unpack(order)
        if kind == OrderKind.KILL:
            if worker_id in self._workers:
                kill_group(self._workers[worker_id].pid)
            return True
        if kind == OrderKind.IMPORT:
            _import_all(orjson.loads(_UnbufferedStream(self._control).read(worker_id)))
            self._code = code_paths(Path(self._sandbox.folder))
            return True
        connection = socket.socket(fileno=descriptors[0])
        try:
            forked = self._fork()
        except (OSError, LayerUnavailableError) as error:
            connection.close()
            self._refuse(worker_id, error)
            return True
        if forked.pid == 0:
            self._become_worker(connection, kind, worker_id, argument)
        connection.close()
        self._workers[worker_id] = forked
        self._report(ReportKind.STARTED, worker_id, forked.pid)
        return True

    def _fork(self) -> ForkedProcess:
        if self._sharing_reason:
            return ForkedProcess(os.fork())
        return fork_into_namespaces(without_network=self._sandbox.without_network)

    def _refuse(self, worker_id: int, error: Exception) -> None:
        """Report that no process can be forked, perhaps for a moment, and continue."""
        _log.error("no process for a worker: %s", error)
        text = str(error).encode()
        self._report(ReportKind.REFUSED, worker_id, status=len(text))
        self._control.sendall(text)

    def _become_worker(
        self, connection: socket.socket, kind: int, worker_id: int, argument: int
    ) -> None:
        """Run the worker in this forked process. Never returns."""
        exit_code = _FAILED_EXIT_CODE
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._control, self._wake, self._wake_writer):
                inherited.close()
            connection.set_inheritable(False)
            os.setsid()
            with contextlib.suppress(OSError, AttributeError):
                show_process()  # its own limits would be hidden otherwise; `confine` hides it again
            _apply_limits(self._setup.limits)
            random.seed()
            np.random.seed()
            self._confine(connection, kind, worker_id)
            if kind == OrderKind.DESCRIBE:
                worker.describe(connection, self._setup.factory, argument / 1000)
            else:
                worker.serve(connection, self._setup.factory, argument)
            exit_code = 0
        except BaseException:  # noqa: BLE001 - the process exits here, with its traceback
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(exit_code)

    def _confine(self, connection: socket.socket, kind: int, worker_id: int) -> None:
        pid = pid_outside_namespace()
        os.environ[WORKER_PID_VARIABLE] = str(pid)
        if self._sharing_reason:
            with contextlib.suppress(OSError, AttributeError):
                adopt_orphans()  # so that they can be killed when the worker exits
        else:
            enter_namespaces()
        missing_layers = confine(self._sandbox, worker_id, pid, self._code, self._sharing_reason)
        if kind == OrderKind.DESCRIBE:
            report = {layer.value: reason for layer, reason in missing_layers.items()}
            connection.sendall(make_frame(orjson.dumps(report)))
        elif missing_layers and self._sandbox.is_required:
            raise SandboxError(f"the sandbox lacks {describe_missing_layers(missing_layers)}")

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        for worker_id, forked in list(self._workers.items()):
            has_exited = os.waitid(os.P_PID, forked.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if has_exited is None:
                continue
            # Kill the worker's group before its id can be reused.
            kill_group(forked.pid)
            _, status, usage = os.wait4(forked.pid, 0)
            del self._workers[worker_id]
            cpu_s = usage.ru_utime + usage.ru_stime
            self._report(ReportKind.EXITED, worker_id, forked.pid, status, cpu_s)
        self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill children that are no workers; their own children become children of this process."""
        worker_pids = {
            pid for forked in self._workers.values() for pid in (forked.pid, forked.keeper_pid)
        }
        for pid in child_pids() - worker_pids - self._own_children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)  # otherwise reaped at the next SIGCHLD

    def _report(
        self,
        kind: ReportKind,
        worker_id: int = 0,
        pid: int = 0,
        status: int = 0,
        cpu_s: float = 0.0,
    ) -> None:
        self._control.sendall(REPORT.pack(kind, worker_id, pid, status, cpu_s))


def main(descriptor: int) -> None:
    """Serve until the server disconnects."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
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
        text = message[:_MAX_FAILURE_CHARS].encode()
        control.sendall(REPORT.pack(ReportKind.FAILED, 0, 0, len(text), 0.0) + text)
        return
    if threading.active_count() > 1:
        _log.warning(
            "importing the environment started %d threads, which do not exist in workers",
            threading.active_count() - 1,
        )
    _import_all(setup.modules)
    ForkServer(control, setup).run()


class _UnbufferedStream:
    """A socket whose frames are read without reading ahead."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def read(self, size: int, /) -> bytes:
        data = b""
        while len(data) < size and (chunk := self._connection.recv(size - len(data))):
            data += chunk
        return data


def _import_all(modules: list[str]) -> None:
    """Import modules once, so that workers share them."""
    for name in modules:
        with contextlib.suppress(Exception):  # the worker will report the error
            importlib.import_module(name)
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
        _set_limit(resource.RLIMIT_DATA, _data_bytes() + (2 * limits.memory_mb + 256) * 2**20)


def _set_limit(kind: int, size: int) -> None:
    hard_limit = resource.getrlimit(kind)[1]
    size = size if hard_limit == resource.RLIM_INFINITY else min(size, hard_limit)
    resource.setrlimit(kind, (size, size))


def _data_bytes() -> int:
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_bytes().split()[5])
        return pages * os.sysconf("SC_PAGESIZE")
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
