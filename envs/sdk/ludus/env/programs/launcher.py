"""`python -m ludus.env.programs.launcher FD FOLDER CONFINEMENT`: the process that starts programs.

    client --order, three descriptors--> launcher --fork--> supervisor --fork--> program
    client <---- status socket, stdout, stderr -------- supervisor        (confined, then exec)

Each program has a supervisor. When the program exits or its caller closes the status socket, the
supervisor kills all of the program's descendants, including those in other process sessions. It
then removes the program's folder and sends the exit status over the status socket, so no process
outlives its caller. The launcher imports everything once, has no threads and stores no program's
secrets.
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
from ludus.env.sandbox.processes import find_outer_pid, kill_child_processes, kill_group
from ludus.env.sandbox.worker_resources import WORKER_PID_VARIABLE, remove_folder, set_home_and_temp

LENGTH_PREFIX = struct.Struct("<I")
"""Length of the following order in bytes."""
EXIT_STATUS = struct.Struct("<i")
"""Exit status of a program, sent over its status socket."""

NOT_STARTED = 127
"""Exit code of a program that could not be started, by shell convention."""
NOT_CONFINED = 126
"""Exit code of a program for which a required layer of the sandbox is missing."""
_MAX_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ProgramOrder:
    """A program to start; the launcher receives it as JSON."""

    id: int
    """Number of the program, which is also the name of its folder."""
    command: list[str]
    variables: dict[str, str]
    """All environment variables, except those of the program's folder (TMPDIR, HOME)."""
    working_folder: str
    readable_paths: list[str] = field(default_factory=list)
    """Readable files and folders in addition to the system's."""


def main(descriptor: int, folder: str, confinement: str) -> None:
    """Start programs until the client disconnects.

    Args:
        descriptor: socket from which orders are read.
        folder: parent of the programs' folders.
        confinement: confinement of programs: "offered", "required" or "off".
    """
    # The kernel reaps supervisors. Each supervisor restores the default for its own children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    order_socket = socket.socket(fileno=descriptor)
    namespace_fault = _check_namespaces() if confinement != "off" else ""
    with contextlib.suppress(ConnectionError):
        while True:
            header, descriptors, _, _ = socket.recv_fds(order_socket, LENGTH_PREFIX.size, 3)
            if len(header) < LENGTH_PREFIX.size:
                break
            order_json = _receive_bytes(order_socket, *LENGTH_PREFIX.unpack(header))
            order = ProgramOrder(**orjson.loads(order_json))
            if os.fork() == 0:
                order_socket.close()
                _run_supervisor(order, descriptors, Path(folder), confinement, namespace_fault)
            for inherited_fd in descriptors:
                os.close(inherited_fd)
    remove_folder(Path(folder))


def _run_supervisor(
    order: ProgramOrder,
    descriptors: list[int],
    folder: Path,
    confinement: str,
    namespace_fault: str,
) -> None:
    """Start the program and report its exit. Never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        with contextlib.suppress(OSError, AttributeError):  # only Linux supports it
            adopt_orphans()
        status_socket, stdout_fd, stderr_fd = descriptors
        try:
            if confinement == "off" or namespace_fault:
                program = ForkedProcess(os.fork())
            else:
                program = fork_into_namespaces(without_network=False)
        except (OSError, LayerUnavailableError) as error:
            os.write(stderr_fd, f"the program could not be forked: {error}\n".encode())
            os.write(status_socket, EXIT_STATUS.pack(NOT_STARTED << 8))
            return
        if program.pid == 0:
            os.close(status_socket)
            sandbox = Sandbox(str(folder), order.readable_paths)
            _exec_program(order, stdout_fd, stderr_fd, sandbox, confinement, namespace_fault)
        for descriptor in (stdout_fd, stderr_fd):
            os.close(descriptor)
        status = _wait_and_kill_descendants(program, status_socket)
        remove_folder(folder / str(order.id))
        with contextlib.suppress(OSError):
            os.write(status_socket, EXIT_STATUS.pack(status))
    finally:
        os._exit(0)


def _wait_and_kill_descendants(program: ForkedProcess, status_socket: int) -> int:
    """Wait for the program or its caller to end, kill all descendants, return the exit status."""
    events = select.poll()
    events.register(status_socket, select.POLLIN)
    events.register(os.pidfd_open(program.pid), select.POLLIN)
    events.poll()
    kill_group(program.pid)
    _, status = os.waitpid(program.pid, 0)
    kill_child_processes()
    return status


def _exec_program(
    order: ProgramOrder,
    stdout_fd: int,
    stderr_fd: int,
    sandbox: Sandbox,
    confinement: str,
    namespace_fault: str,
) -> None:
    """Replace this process by the program. Never returns."""
    exit_code = NOT_STARTED
    try:
        os.setsid()
        null_fd = os.open(os.devnull, os.O_RDWR)
        for target_fd, source_fd in enumerate((null_fd, stdout_fd, stderr_fd)):
            os.dup2(source_fd, target_fd)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
        os.environ.clear()
        os.environ.update(order.variables)
        outer_pid = find_outer_pid()
        os.environ[WORKER_PID_VARIABLE] = str(outer_pid)
        if confinement == "off":
            folder = sandbox.worker_folder(order.id)
            folder.mkdir(mode=0o700)
            set_home_and_temp(folder)
        else:
            if not namespace_fault:
                enter_namespaces()
            missing_layers = confine(sandbox, order.id, outer_pid, [], namespace_fault)
            if missing_layers and confinement == "required":
                exit_code = NOT_CONFINED
                layers = describe_missing_layers(missing_layers)
                raise PermissionError(f"the sandbox lacks {layers}")
        os.chdir(order.working_folder)
        os.execvpe(order.command[0], order.command, os.environ)
    except BaseException as error:  # noqa: BLE001 - the process exits here and reports the error
        os.write(2, f"{order.command[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(exit_code)


def _check_namespaces() -> str:
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


def _receive_bytes(connection: socket.socket, size: int) -> bytes:
    received_bytes = b""
    while len(received_bytes) < size:
        chunk = connection.recv(size - len(received_bytes))
        if not chunk:
            raise ConnectionError("the client disconnected")
        received_bytes += chunk
    return received_bytes


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4])
