"""`python runner.py DESCRIPTOR`: runs programs, each in a copy of this process that ends with it.

DESCRIPTOR is a socket. Each message brings the descriptors of one program:

    job         {"code", "function", "calls", "cpu_s", "memory_bytes"}, JSON, read to its end
    stdout      what it writes
    stderr
    outcomes    a line of JSON before the program: {"pid": its process} or {"refused": why}
                then one per call, as it ends: {"value": ...} or {"error": "..."}
    end         its exit code, once it has ended

The program never learns what a call should return. It may compute, read the system's libraries
and write to stdout and stderr; files, processes, threads, signals and sockets are refused by the
kernel, and it cannot undo that.
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
from typing import Any

from ludus.env.sandbox.kernel import LayerUnavailableError
from ludus.env.sandbox.landlock import restrict_files
from ludus.env.sandbox.privileges import give_up_privileges
from ludus.env.sandbox.seccomp import refuse_system_calls
from ludus.env.sandbox.worker_resources import device_paths, system_paths

_FILE = "answer.py"
_NUM_DESCRIPTORS = 5
_MAX_ERROR_CHARS = 500
_MAX_OPEN_FILES = 64


def main(descriptor: int) -> int:
    """The exit code: 0, or 1 after an exception; the program may end it with another one."""
    _use_standard_library_only()
    outcomes = _copied(descriptor)
    return 0 if outcomes is None else _run(outcomes)


def _copied(descriptor: int) -> int | None:
    """Where to write outcomes, in a copy that has a program to run; None when no more come."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    with socket.socket(fileno=descriptor) as requests:
        while found := socket.recv_fds(requests, 1, _NUM_DESCRIPTORS)[1]:
            if not os.fork():
                return _watched(found)
            for one in found:
                os.close(one)
    return None


def _watched(descriptors: list[int]) -> int:
    """Where to write outcomes, in a copy whose parent waits for it and says how it ended."""
    *streams, outcomes, end = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        status = os.waitpid(pid, 0)[1]
        os.write(end, b"%d" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.setsid()
    os.close(end)
    for place, one in enumerate(streams):
        os.dup2(one, place)
        os.close(one)
    return outcomes


def _run(outcomes: int) -> int:
    job = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        _confine(job["cpu_s"], job["memory_bytes"])
    except (LayerUnavailableError, OSError) as error:
        _tell(outcomes, {"refused": str(error)})
        return 1
    _tell(outcomes, {"pid": os.getpid()})
    names: dict[str, Any] = {"__name__": "__main__", "__file__": _FILE}
    try:
        exec(compile(job["code"], _FILE, "exec"), names)
    except Exception as error:  # noqa: BLE001 - it is the program's, and is shown to who wrote it
        _print_error(error)
        return 1
    for arguments in job["calls"]:
        _tell(outcomes, _outcome(names.get(job["function"]), job["function"], arguments))
    return 0


def _confine(cpu_s: int, memory_bytes: int) -> None:
    """Take from this process what a program that computes does not need.

    Raises:
        LayerUnavailableError: this system has no filter for system calls.
        OSError: the kernel refuses a limit.
    """
    used_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    limits = {
        resource.RLIMIT_CPU: math.ceil(used_s + cpu_s),
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    if not sys.platform.startswith("linux"):
        raise LayerUnavailableError("only Linux can keep a program from starting others")
    give_up_privileges()
    code = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    # An older kernel may lack it; what confines the server's worker holds for its children, too.
    with contextlib.suppress(LayerUnavailableError):
        restrict_files([*system_paths(), *code], device_paths())
    refuse_system_calls(computes_only=True)


def _use_standard_library_only() -> None:
    """Make the program find neither this project's code nor what is installed beside it."""
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    dynamic = {str(Path(place, "lib-dynload")) for place in places}
    sys.path[:] = [place for place in sys.path if place in places | dynamic]
    # Where code that is installed for editing lies, finders of its own know.
    sys.meta_path[:] = [one for one in sys.meta_path if _module_of(one).startswith("_frozen_")]
    known = sys.stdlib_module_names
    for name in [name for name in sys.modules if name.partition(".")[0] not in known]:
        if name != "__main__":
            del sys.modules[name]


def _module_of(finder: object) -> str:
    return str(getattr(finder, "__module__", ""))


def _outcome(function: Callable[..., Any] | None, name: str, arguments: list[Any]) -> Any:
    """What one call came to, as JSON can hold it."""
    if not callable(function):
        return {"error": f"NameError: there is no function {name}"}
    try:
        outcome = {"value": function(*arguments)}
        json.dumps(outcome)
    except Exception as error:  # noqa: BLE001 - it is the program's, and is shown to who wrote it
        return {"error": "".join(traceback.format_exception_only(error)).strip()[:_MAX_ERROR_CHARS]}
    return outcome


def _print_error(error: Exception) -> None:
    """Show the program's part of a traceback."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    traceback.print_exception(type(error), error, frames)


def _tell(descriptor: int, line: Any) -> None:
    sys.stdout.flush()
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
