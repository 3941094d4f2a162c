"""`python -m ludus.env.workers.forkserver FD`: the process from which workers are forked.

    server --start, with a socket--> fork server --fork--> worker <--calls, answers--> server
    server <--started, exited------- fork server              (confined before it builds anything)

It imports the environment's module once and builds nothing, so a fork is quick, its memory
is shared, and no thread is lost in it. It is the parent of whatever its workers leave behind,
in sessions of their own too, and kills that with the worker. When its server ends, however, it
kills what is left. Nothing waits for the environment here: a worker that hangs never delays
another.
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

from ludus.env.sandbox.confine import Sandbox, SandboxError, confine, describe_missing_layers
from ludus.env.sandbox.kernel import LayerUnavailableError
from ludus.env.sandbox.namespaces import (
    ForkedProcess,
    adopt_orphans,
    enter_namespaces,
    fork_into_namespaces,
    require_namespaces,
)
from ludus.env.sandbox.privileges import hide_process, show_process
from ludus.env.sandbox.worker_resources import WORKER_PID_VARIABLE, code_paths, remove_folder
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
    make_frame,
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
        self,
        control: socket.socket,
        factory: TargetFactory,
        limits: WorkerLimits,
        sandbox: Sandbox,
    ) -> None:
        self._control = control
        self._factory = factory
        self._limits = limits
        self._sandbox = sandbox
        self._code = code_paths(Path(sandbox.folder))
        self._workers: dict[int, ForkedProcess] = {}
        """Those that live, by worker id."""
        with contextlib.suppress(OSError, AttributeError):  # only Linux has them
            adopt_orphans()
            hide_process()
        self._own_children = _children()
        """What importing the environment has started; it is no worker's."""
        self._find_sharing_reason = _find_sharing_reason(sandbox)
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
        for forked in self._workers.values():
            kill_group(forked.pid)
        for forked in self._workers.values():
            os.waitpid(forked.pid, 0)
        while left := _children():
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
        remove_folder(Path(self._sandbox.folder))

    def _obey(self) -> bool:
        """False when there will be no more orders."""
        order, descriptors, _, _ = socket.recv_fds(self._control, ORDER.size, 1)
        if len(order) < ORDER.size:
            return False
        kind, worker_id, argument = ORDER.unpack(order)
        if kind == OrderKind.KILL:
            if worker_id in self._workers:
                kill_group(self._workers[worker_id].pid)
            return True
        if kind == OrderKind.IMPORT:
            _import_all(orjson.loads(_Unbuffered(self._control).read(worker_id)))
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
        if self._find_sharing_reason:
            return ForkedProcess(os.fork())
        return fork_into_namespaces(without_network=self._sandbox.without_network)

    def _refuse(self, worker_id: int, error: Exception) -> None:
        """Processes, memory or namespaces are used up, perhaps for a moment: go on without it."""
        _log.error("no process for a worker: %s", error)
        text = str(error).encode()
        self._report(ReportKind.REFUSED, worker_id, status=len(text))
        self._control.sendall(text)

    def _become_worker(
        self, connection: socket.socket, kind: int, worker_id: int, argument: int
    ) -> None:
        """Never returns: this is the child now."""
        exit_code = _FAILED_EXIT_CODE
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._control, self._wake, self._wake_writer):
                inherited.close()
            connection.set_inheritable(False)
            os.setsid()
            with contextlib.suppress(OSError, AttributeError):
                show_process()  # or its own limits would be closed to it; `confine` hides it again
            _limit(self._limits)
            random.seed()
            np.random.seed()
            self._confine(connection, kind, worker_id)
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

    def _confine(self, connection: socket.socket, kind: int, worker_id: int) -> None:
        pid = _own_pid()
        os.environ[WORKER_PID_VARIABLE] = str(pid)
        if self._find_sharing_reason:
            with contextlib.suppress(OSError, AttributeError):
                adopt_orphans()  # so that they are still there, to be killed, at the worker's end
        else:
            enter_namespaces()
        missing = confine(self._sandbox, worker_id, pid, self._code, self._find_sharing_reason)
        if kind == OrderKind.DESCRIBE:
            told = {layer.value: why for layer, why in missing.items()}
            connection.sendall(make_frame(orjson.dumps(told)))
        elif missing and self._sandbox.is_required:
            raise SandboxError(f"the sandbox lacks {describe_missing_layers(missing)}")

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        for worker_id, forked in list(self._workers.items()):
            ended = os.waitid(os.P_PID, forked.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is None:
                continue
            # Before its id can belong to somebody else: what the worker itself had started.
            kill_group(forked.pid)
            _, status, usage = os.wait4(forked.pid, 0)
            del self._workers[worker_id]
            cpu_s = usage.ru_utime + usage.ru_stime
            self._report(ReportKind.EXITED, worker_id, forked.pid, status, cpu_s)
        self._kill_what_was_left_behind()

    def _kill_what_was_left_behind(self) -> None:
        """End the children that are no worker's; their own become this process's, in turn."""
        known = {
            pid for forked in self._workers.values() for pid in (forked.pid, forked.keeper_pid)
        }
        for pid in _children() - known - self._own_children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)  # else at the signal that tells of its end

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
    ForkServer(control, factory, setup.limits, setup.sandbox).run()


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


def _find_sharing_reason(sandbox: Sandbox) -> str:
    """Why workers share this process's namespaces; empty where each has its own."""
    try:
        require_namespaces(without_network=sandbox.without_network)
    except LayerUnavailableError as error:
        return str(error)
    return ""


def _own_pid() -> int:
    """This process as its parent sees it: /proc is still the parent's."""
    try:
        return int(os.readlink("/proc/self"))
    except OSError:
        return os.getpid()


def _children() -> set[int]:
    """All children, also those that have ended."""
    with contextlib.suppress(OSError):
        return set(map(int, Path("/proc/thread-self/children").read_text().split()))
    return set()


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
