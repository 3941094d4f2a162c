"""`python -m ludus.env.programs.launcher FD`: the process from which programs are started.

    client --order, three descriptors--> launcher --fork--> minder --fork--> program
    client <---- life line, stdout, stderr ---------------- minder           (confined, then exec)

Each program has a minder. When the program ends, or nobody holds the other end of its life line
any more, the minder kills whatever the program has started, in sessions of its own too, removes its
folder, and says on the life line how it ended. So nothing outlives its caller, whoever dies. The
launcher imports once what all of them need; it has no threads, and holds no program's secrets.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import struct
import sys
from pathlib import Path

from ludus.env.programs.order import NOT_CONFINED, NOT_STARTED, ProgramOrder
from ludus.env.sandbox.confine import Sandbox, confine, describe_missing_layers
from ludus.env.sandbox.kernel import LayerUnavailableError
from ludus.env.sandbox.namespaces import (
    Forked,
    adopt_orphans,
    enter_namespaces,
    fork_into_namespaces,
    require_namespaces,
)
from ludus.env.sandbox.surroundings import WORKER_PID_VARIABLE, remove_folder, use_folder

SIZE = struct.Struct("<I")
"""Before each order: its bytes."""
STATUS = struct.Struct("<i")
"""On a life line: how the program ended."""
NUM_DESCRIPTORS = 3
"""With each order: life line, stdout, stderr."""

_MAX_FILE_BYTES = 1 << 30


def main(descriptor: int, folder: str, mode: str) -> None:
    """Start programs until the client is gone.

    Args:
        descriptor: of the socket on which orders come.
        folder: in which each program gets its own.
        mode: "offered", "required" or "off": what is confined.
    """
    # Minders end by themselves and nobody asks how; each sets this back for its own children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    orders = socket.socket(fileno=descriptor)
    why_shared = _why_shared() if mode != "off" else ""
    with contextlib.suppress(ConnectionError):
        while True:
            header, descriptors, _, _ = socket.recv_fds(orders, SIZE.size, NUM_DESCRIPTORS)
            if len(header) < SIZE.size:
                break
            order = ProgramOrder.from_json(_exactly(orders, *SIZE.unpack(header)))
            if os.fork() == 0:
                orders.close()
                _mind(order, descriptors, Path(folder), mode, why_shared)
            for one in descriptors:
                os.close(one)
    remove_folder(Path(folder))


def _mind(
    order: ProgramOrder, descriptors: list[int], folder: Path, mode: str, why_shared: str
) -> None:
    """Never returns: this is the minder now."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        with contextlib.suppress(OSError, AttributeError):  # only Linux has it
            adopt_orphans()
        line, out, err = descriptors
        apart = mode != "off" and not why_shared
        try:
            forked = fork_into_namespaces(without_network=False) if apart else Forked(os.fork())
        except (OSError, LayerUnavailableError) as error:
            os.write(err, f"no process for the program: {error}\n".encode())
            os.write(line, STATUS.pack(NOT_STARTED << 8))
            return
        if forked.pid == 0:
            os.close(line)
            _become(order, out, err, Sandbox(str(folder), order.readable), mode, why_shared)
        for one in (out, err):
            os.close(one)
        status = _outlive(forked, line)
        remove_folder(folder / str(order.id))
        with contextlib.suppress(OSError):
            os.write(line, STATUS.pack(status))
    finally:
        os._exit(0)


def _outlive(forked: Forked, line: int) -> int:
    """How the program ended, once all that it has started is gone as well."""
    program = os.pidfd_open(forked.pid)
    waiting = select.poll()
    waiting.register(line, select.POLLIN)
    waiting.register(program, select.POLLIN)
    waiting.poll()
    _kill_group(forked.pid)
    _, status = os.waitpid(forked.pid, 0)
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
    return status


def _become(
    order: ProgramOrder, out: int, err: int, sandbox: Sandbox, mode: str, why_shared: str
) -> None:
    """Never returns: this is the program now."""
    exit_code = NOT_STARTED
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for place, source in enumerate((nothing, out, err)):
            os.dup2(source, place)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
        os.environ.clear()
        os.environ.update(order.variables)
        pid = int(os.readlink("/proc/self")) if Path("/proc/self").exists() else os.getpid()
        os.environ[WORKER_PID_VARIABLE] = str(pid)
        if mode == "off":
            own = sandbox.folder_of(order.id)
            own.mkdir(mode=0o700)
            use_folder(own)
        else:
            if not why_shared:
                enter_namespaces()
            missing = confine(sandbox, order.id, pid, [], why_shared)
            if missing and mode == "required":
                exit_code = NOT_CONFINED
                raise PermissionError(f"the sandbox lacks {describe_missing_layers(missing)}")
        os.chdir(order.working_folder)
        os.execvpe(order.command[0], order.command, os.environ)
    except BaseException as error:  # noqa: BLE001 - the process ends here, and says why
        os.write(2, f"{order.command[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(exit_code)


def _why_shared() -> str:
    """Why programs share this process's namespaces; empty where each has its own."""
    try:
        # Trying it out waits for children, which nobody could while their ends are ignored.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        adopt_orphans()
        require_namespaces(without_network=False)
    except (LayerUnavailableError, OSError, AttributeError) as error:
        return str(error) or "only Linux has them"
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return ""


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _children() -> set[int]:
    with contextlib.suppress(OSError):
        return set(map(int, Path("/proc/thread-self/children").read_text().split()))
    return set()


def _exactly(connection: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        more = connection.recv(size - len(read))
        if not more:
            raise ConnectionError("the client is gone")
        read += more
    return read


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4])
