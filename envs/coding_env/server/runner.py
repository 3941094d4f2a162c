"""Runner of programs, each in a fork of this process: `python runner.py DESCRIPTOR SDK_FOLDER`.

SDK_FOLDER is the folder of the package `ludus.env`. DESCRIPTOR is a socket. Each message contains
the file descriptors of one program:

    job            JSON until end of file: {"code", "function", "calls", "cpu_s", "memory_bytes"}
    stdout         output of the program
    stderr         errors of the program
    outcomes       before the program, a line {"pid": process id} or {"refused": reason};
                   then one line per call: {"value": ...} or {"error": "..."}
    exit status    exit code of the program

The program never gets the expected values. It can compute, read system libraries and write to
stdout and stderr. The kernel refuses files, processes, threads, signals and sockets, and the
program cannot change that.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def _add_package(name: str, folders: list[str]) -> None:
    """Make a package importable from these folders alone."""
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = folders


if __name__ == "__main__":
    # A worker may read the folder of each package that it has loaded, but not the folders above,
    # in which an import would have to search for these packages.
    _add_package("ludus", [])
    _add_package("ludus.env", [sys.argv[2]])

from ludus.env.sandbox.kernel import LayerUnavailableError  # noqa: E402
from ludus.env.sandbox.landlock import restrict_files  # noqa: E402
from ludus.env.sandbox.processes import give_up_privileges  # noqa: E402
from ludus.env.sandbox.seccomp import refuse_system_calls  # noqa: E402
from ludus.env.sandbox.worker_resources import (  # noqa: E402
    list_device_paths,
    list_system_paths,
)

_PROGRAM_FILE = "answer.py"
_NUM_DESCRIPTORS = 5
_MAX_ERROR_CHARS = 500
_MAX_OPEN_FILES = 64


def main(descriptor: int) -> int:
    """Serve requests, and return 0 at the end. In a fork, run one program and return its exit code.

    The exit code of a program is 1 after an exception.
    """
    _use_standard_library_only()
    outcomes_descriptor = _serve_forks(descriptor)
    return 0 if outcomes_descriptor is None else _run_job(outcomes_descriptor)


def _serve_forks(descriptor: int) -> int | None:
    """Fork for each request. Return the outcomes descriptor in a fork, and None at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exited forks are reaped automatically
    with socket.socket(fileno=descriptor) as requests:
        while descriptors := socket.recv_fds(requests, 1, _NUM_DESCRIPTORS)[1]:
            if not os.fork():
                return _fork_program(descriptors)
            for program_descriptor in descriptors:
                os.close(program_descriptor)
    return None


def _fork_program(descriptors: list[int]) -> int:
    """Fork the program's process and return its outcomes descriptor there.

    The parent waits, writes the exit code of the program, and exits.
    """
    *stream_descriptors, outcomes_descriptor, exit_status = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        status = os.waitpid(pid, 0)[1]
        os.write(exit_status, b"%d" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.setsid()
    os.close(exit_status)
    for standard_stream, stream_descriptor in enumerate(stream_descriptors):
        os.dup2(stream_descriptor, standard_stream)
        os.close(stream_descriptor)
    return outcomes_descriptor


def _run_job(outcomes_descriptor: int) -> int:
    job = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        _confine(job["cpu_s"], job["memory_bytes"])
    except (LayerUnavailableError, OSError) as error:
        _write_line(outcomes_descriptor, {"refused": str(error)})
        return 1
    _write_line(outcomes_descriptor, {"pid": os.getpid()})
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": _PROGRAM_FILE}
    try:
        exec(compile(job["code"], _PROGRAM_FILE, "exec"), namespace)
    except Exception as error:  # noqa: BLE001 - any error of the program is shown to the player
        _print_error(error)
        return 1
    for arguments in job["calls"]:
        _write_line(
            outcomes_descriptor,
            _call_function(namespace.get(job["function"]), job["function"], arguments),
        )
    return 0


def _confine(cpu_s: int, memory_bytes: int) -> None:
    """Restrict this process to computation: no files, processes or sockets.

    Raises:
        LayerUnavailableError: This system cannot filter system calls.
        OSError: The kernel refuses a limit.
    """
    used_cpu_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    limits = {
        resource.RLIMIT_CPU: math.ceil(used_cpu_s + cpu_s),
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
    }
    for resource_kind, limit in limits.items():
        resource.setrlimit(resource_kind, (limit, limit))
    if not sys.platform.startswith("linux"):
        raise LayerUnavailableError("only Linux can prevent a program from starting processes")
    give_up_privileges()
    library_paths = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    # An older kernel may lack Landlock. The sandbox of the server's worker still applies.
    with contextlib.suppress(LayerUnavailableError):
        restrict_files([*list_system_paths(), *library_paths], list_device_paths())
    refuse_system_calls(computes_only=True)


def _use_standard_library_only() -> None:
    """Hide this project's code and all installed packages from the program."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    extension_folders = {str(Path(folder, "lib-dynload")) for folder in folders}
    sys.path[:] = [path for path in sys.path if path in folders | extension_folders]
    # Editable installs of packages add finders.
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if str(getattr(finder, "__module__", "")).startswith("_frozen_")
    ]
    for name in list(sys.modules):
        if name != "__main__" and name.partition(".")[0] not in sys.stdlib_module_names:
            del sys.modules[name]


def _call_function(function: Callable[..., Any] | None, name: str, arguments: list[Any]) -> Any:
    """Call the function and return the outcome, which is JSON."""
    if not callable(function):
        return {"error": f"NameError: there is no function {name}"}
    try:
        outcome = {"value": function(*arguments)}
        json.dumps(outcome)
    except Exception as error:  # noqa: BLE001 - any error of the program is shown to the player
        return {"error": "".join(traceback.format_exception_only(error)).strip()[:_MAX_ERROR_CHARS]}
    return outcome


def _print_error(error: Exception) -> None:
    """Print the traceback without this file's frames."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    traceback.print_exception(type(error), error, frames)


def _write_line(descriptor: int, message: Any) -> None:
    sys.stdout.flush()
    remaining_bytes = json.dumps(message).encode() + b"\n"
    while remaining_bytes:
        remaining_bytes = remaining_bytes[os.write(descriptor, remaining_bytes) :]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
