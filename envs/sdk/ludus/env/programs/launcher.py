"""`python -m ludus.env.programs.launcher FD FOLDER MODE`: the process that starts programs.

    client --order, three descriptors--> launcher --fork--> minder --fork--> program
    client <---- life line, stdout, stderr ---------------- minder           (confined, then exec)

Each program has a minder. When the program exits or its caller closes the life line, the minder
kills all of the program's descendants, including those in other process sessions. It then removes
the program's folder and sends the exit status over the life line, so no process outlives its
caller. The launcher imports everything once, has no threads and stores no program's secrets.
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
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from ludus.env.sandbox.confine import Sandbox, confine, describe_missing_layers
from ludus.env.sandbox.kernel import LayerUnavailableError
from ludus.env.sandbox.namespaces import (
    ForkedProcess,
    adopt_orphans,
    enter_namespaces,
    find_namespace_fault,
    fork_into_namespaces,
)
from ludus.env.sandbox.processes import child_pids, kill_group, pid_outside_namespace
from ludus.env.sandbox.worker_resources import (
    WORKER_PID_VARIABLE,
    remove_folder,
    set_home_and_temp,
)

LENGTH_PREFIX = struct.Struct("<I")
"""Length of the following order in bytes."""
EXIT_STATUS = struct.Struct("<i")
"""Exit status of a program, sent over its life line."""
NUM_DESCRIPTORS = 3
"""Number of descriptors that come with each order: life line, stdout and stderr."""

NOT_STARTED = 127
"""Exit code of a program that could not be started, by shell convention."""
NOT_CONFINED = 126
"""Exit code of a program for which a required layer of the sandbox is missing."""
_MAX_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ProgramOrder:
    """A program to start; sent as JSON."""

    id: int
    """Name of the program's folder."""
    command: list[str]
    variables: dict[str, str]
    """All environment variables, except those of the program's folder (TMPDIR, HOME)."""
    working_folder: str
    readable: list[str] = field(default_factory=list)
    """Readable files and folders in addition to the system's."""


def main(descriptor: int, folder: str, mode: str) -> None:
    """Start programs until the client disconnects.

    Args:
        descriptor: socket from which orders are read.
        folder: parent of the programs' folders.
        mode: confinement of programs: "offered", "required" or "off".
    """
    # Exited minders are reaped automatically. Each minder restores the default for its children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    orders = socket.socket(fileno=descriptor)
    sharing_reason = _find_sharing_reason() if mode != "off" else ""
    with contextlib.suppress(ConnectionError):
        while True:
            header, descriptors, _, _ = socket.recv_fds(orders, LENGTH_PREFIX.size, NUM_DESCRIPTORS)
            if len(header) < LENGTH_PREFIX.size:
                break
            order = ProgramOrder(**orjson.loads(_receive(orders, *LENGTH_PREFIX.unpack(header))))
            if os.fork() == 0:
                orders.close()
                _run_minder(order, descriptors, Path(folder), mode, sharing_reason)
            for inherited in descriptors:
                os.close(inherited)
    remove_folder(Path(folder))


def _run_minder(
    order: ProgramOrder, descriptors: list[int], folder: Path, mode: str, sharing_reason: str
) -> None:
    """Start the program and report its exit. Never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        with contextlib.suppress(OSError, AttributeError):  # only Linux supports it
            adopt_orphans()
        life_line, out, err = descriptors
        try:
            if mode == "off" or sharing_reason:
                forked = ForkedProcess(os.fork())
            else:
                forked = fork_into_namespaces(without_network=False)
        except (OSError, LayerUnavailableError) as error:
            os.write(err, f"no process for the program: {error}\n".encode())
            os.write(life_line, EXIT_STATUS.pack(NOT_STARTED << 8))
            return
        if forked.pid == 0:
            os.close(life_line)
            sandbox = Sandbox(str(folder), order.readable)
            _exec_program(order, out, err, sandbox, mode, sharing_reason)
        for stream in (out, err):
            os.close(stream)
        status = _wait_and_kill_descendants(forked, life_line)
        remove_folder(folder / str(order.id))
        with contextlib.suppress(OSError):
            os.write(life_line, EXIT_STATUS.pack(status))
    finally:
        os._exit(0)


def _wait_and_kill_descendants(forked: ForkedProcess, life_line: int) -> int:
    """Wait for the program or its caller to end, kill all descendants, return the exit status."""
    events = select.poll()
    events.register(life_line, select.POLLIN)
    events.register(os.pidfd_open(forked.pid), select.POLLIN)
    events.poll()
    kill_group(forked.pid)
    _, status = os.waitpid(forked.pid, 0)
    while children := child_pids():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
    return status


def _exec_program(
    order: ProgramOrder, out: int, err: int, sandbox: Sandbox, mode: str, sharing_reason: str
) -> None:
    """Replace this process by the program. Never returns."""
    exit_code = NOT_STARTED
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for target, source in enumerate((null, out, err)):
            os.dup2(source, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
        os.environ.clear()
        os.environ.update(order.variables)
        pid = pid_outside_namespace()
        os.environ[WORKER_PID_VARIABLE] = str(pid)
        if mode == "off":
            folder = sandbox.worker_folder(order.id)
            folder.mkdir(mode=0o700)
            set_home_and_temp(folder)
        else:
            if not sharing_reason:
                enter_namespaces()
            layers = confine(sandbox, order.id, pid, [], sharing_reason)
            if layers and mode == "required":
                exit_code = NOT_CONFINED
                raise PermissionError(f"the sandbox lacks {describe_missing_layers(layers)}")
        os.chdir(order.working_folder)
        os.execvpe(order.command[0], order.command, os.environ)
    except BaseException as error:  # noqa: BLE001 - the process exits here and reports the error
        os.write(2, f"{order.command[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(exit_code)


def _find_sharing_reason() -> str:
    """Return why programs share this process's namespaces, or "" if each program gets its own."""
    try:
        # The trial must wait for its child processes, which SIG_IGN makes impossible.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        adopt_orphans()
        return find_namespace_fault(without_network=False)
    except (OSError, AttributeError) as error:
        return str(error) or "namespaces need Linux"
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the client disconnected")
        data += chunk
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4])
