"""`python -m ludus.env.workers.forkserver FD`: the process from which workers are forked.

    server --start, with a socket--> fork server --fork--> worker <--calls, answers--> server
    server <--started, exited------- fork server

It imports the environment's module once and builds nothing, so a fork is quick, its memory
is shared, and no thread is lost in it. When its server ends, however, it kills what is
left. Nothing waits for the environment here: a worker that hangs never delays another.
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

from ludus.env.targets.targets import TargetFactory
from ludus.env.workers import child as worker
from ludus.env.workers.protocol import (
    ORDER,
    REPORT,
    ForkServerSetup,
    OrderKind,
    ReportKind,
    WorkerLimits,
    kill_group,
    read_frame,
)
from ludus.proto.errors import UserError

_log = logging.getLogger(__name__)

_MAX_FILE_BYTES = 1 << 30
_MAX_FAILURE_CHARS = 2_000
_FAILED_EXIT_CODE = 70
_OOM_SCORE = b"500"
"""When memory runs out the kernel ends workers before it ends their server."""


class ForkServer:
    """Forks workers on orders from the control socket, and reports their ends."""

    def __init__(
        self, control: socket.socket, factory: TargetFactory, limits: WorkerLimits
    ) -> None:
        self._control = control
        self._factory = factory
        self._limits = limits
        self._pids: dict[int, int] = {}
        """Of living workers, by worker id."""
        self._wake, wake_writer = socket.socketpair()
        self._wake.setblocking(False)
        wake_writer.setblocking(False)
        self._wake_writer = wake_writer
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Obey until the server is gone, then kill all workers."""
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        waiting.register(self._wake, select.POLLIN)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._report(ReportKind.READY)
            while True:
                for descriptor, _ in waiting.poll():
                    if descriptor == self._wake.fileno():
                        self._reap()
                    elif not self._obey():
                        break
                else:
                    continue
                break
        for pid in self._pids.values():
            kill_group(pid)
        for pid in self._pids.values():
            os.waitpid(pid, 0)

    def _obey(self) -> bool:
        """False when there will be no more orders."""
        order, descriptors, _, _ = socket.recv_fds(self._control, ORDER.size, 1)
        if len(order) < ORDER.size:
            return False
        kind, worker_id, argument = ORDER.unpack(order)
        if kind == OrderKind.KILL:
            if worker_id in self._pids:
                kill_group(self._pids[worker_id])
            return True
        if kind == OrderKind.IMPORT:
            _import_all(orjson.loads(_Unbuffered(self._control).read(worker_id)))
            return True
        connection = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            self._become_worker(connection, kind, argument)
        connection.close()
        self._pids[worker_id] = pid
        self._report(ReportKind.STARTED, worker_id, pid)
        return True

    def _become_worker(self, connection: socket.socket, kind: int, argument: int) -> None:
        """Never returns: this is the child now."""
        exit_code = _FAILED_EXIT_CODE
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._control, self._wake, self._wake_writer):
                inherited.close()
            connection.set_inheritable(False)
            os.setsid()
            _limit(self._limits)
            random.seed()
            np.random.seed()
            if kind == OrderKind.DESCRIBE:
                worker.describe(connection, self._factory, argument / 1000)
            else:
                worker.serve(connection, self._factory, argument)
            exit_code = 0
        except BaseException:  # noqa: BLE001 - the process ends here, with its traceback
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(exit_code)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        for worker_id, pid in list(self._pids.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                continue
            # Before its id can belong to somebody else: what the worker itself had started.
            kill_group(pid)
            _, status, usage = os.wait4(pid, 0)
            del self._pids[worker_id]
            self._report(ReportKind.EXITED, worker_id, pid, status, usage.ru_utime + usage.ru_stime)

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
    """Serve until the server is gone."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    control = socket.socket(fileno=descriptor)
    setup_json = read_frame(_Unbuffered(control))
    if setup_json is None:
        return
    setup = ForkServerSetup.from_json(setup_json)
    sys.path[:] = setup.sys_path
    try:
        factory = setup.factory.resolve()
    except BaseException as error:  # noqa: BLE001 - the boundary to foreign code
        said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        text = said[:_MAX_FAILURE_CHARS].encode()
        control.sendall(REPORT.pack(ReportKind.FAILED, 0, 0, len(text), 0.0) + text)
        return
    if threading.active_count() > 1:
        _log.warning(
            "importing the environment started %d threads; they do not live on in workers",
            threading.active_count() - 1,
        )
    _import_all(setup.modules)
    ForkServer(control, factory, setup.limits).run()


class _Unbuffered:
    """A socket to read frames from, and nothing beyond them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def read(self, size: int, /) -> bytes:
        """So many bytes, or fewer at the end."""
        read = b""
        while len(read) < size and (more := self._connection.recv(size - len(read))):
            read += more
        return read


def _import_all(modules: list[str]) -> None:
    """Import once, to be shared, what workers would import one by one."""
    for name in modules:
        with contextlib.suppress(Exception):  # then the worker says what is wrong
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the first collection in a worker copies all that it shares


def _limit(limits: WorkerLimits) -> None:
    """Set what the kernel holds this process to."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _set_limit(resource.RLIMIT_FSIZE, _MAX_FILE_BYTES)
    if limits.cpu_s > 0:
        seconds = max(1, round(limits.cpu_s))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with contextlib.suppress(OSError):  # only Linux has it
        Path("/proc/self/oom_score_adj").write_bytes(_OOM_SCORE)
    if limits.memory_mb > 0:
        # The server looks at what is resident. This stops what grows faster than it looks,
        # and leaves room for what is reserved and never used.
        _set_limit(resource.RLIMIT_DATA, _data_bytes() + (2 * limits.memory_mb + 256) * 2**20)


def _set_limit(kind: int, size: int) -> None:
    hard = resource.getrlimit(kind)[1]
    size = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(kind, (size, size))


def _data_bytes() -> int:
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_bytes().split()[5])
        return pages * os.sysconf("SC_PAGESIZE")
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
