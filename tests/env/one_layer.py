"""A program that applies one layer of the sandbox and tries to do forbidden operations.

Usage: `python one_layer.py LAYER FOLDER SECRET_FILE PID OPERATION...`. The program prints a JSON
object with "done" or the name of the error for each operation. If the layer is unavailable, the
object contains the reason instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ludus.env.sandbox import namespaces
from ludus.env.sandbox.kernel import LayerUnavailableError
from ludus.env.sandbox.landlock import require_signal_scope, restrict_files
from ludus.env.sandbox.processes import (
    give_up_privileges,
    hide_process,
    limit_processes,
    take_user_id,
)
from ludus.env.sandbox.seccomp import refuse_system_calls
from ludus.env.sandbox.worker_resources import list_code_paths, list_system_paths

_CLONE_NEWUSER = 0x1000_0000
_PTRACE_SEIZE = 0x4206


def main(
    layer: str, folder: Path, secret_file: Path, pid: int, operation_names: list[str]
) -> dict[str, Any]:
    """Apply the layer, try the operations, and return the outcome of each operation."""
    (folder / "own").mkdir(mode=0o700)
    own_folder = folder / "own"
    try:
        if layer == "namespaces":
            return run_in_namespaces(pid)
        apply_layer(layer, own_folder)
    except LayerUnavailableError as error:
        return {"not offered": str(error)}
    operations: dict[str, Callable[[], object]] = {
        "read": lambda: secret_file.read_text(),
        "write": lambda: secret_file.with_name("new").write_text("x"),
        "write own": lambda: (own_folder / "file").write_text("x"),
        "environ": lambda: Path(f"/proc/{pid}/environ").read_bytes(),
        "signal": lambda: os.kill(pid, 0),
        "trace": lambda: call_libc("ptrace", _PTRACE_SEIZE, pid, 0, 0),
        "unshare": lambda: call_libc("unshare", _CLONE_NEWUSER),
        "regain": lambda: os.setuid(0),
        "be looked into": lambda: read_parent_from_child(),
        "fork": lambda: fork_children(5),
        "fork many": lambda: fork_children(30),
    }
    return {name: try_operation(operations[name]) for name in operation_names}


def apply_layer(layer: str, own_folder: Path) -> None:
    match layer:
        case "user-id":
            take_user_id(os.getpid(), own_folder, [], [])
        case "landlock":
            give_up_privileges()
            restrict_files([*list_system_paths(), *list_code_paths(own_folder)], [own_folder])
        case "signal-scope":
            require_signal_scope()
            give_up_privileges()
            restrict_files([Path("/")], [Path("/")])
        case "seccomp":
            give_up_privileges()
            refuse_system_calls()
        case "process-limit":
            take_user_id(os.getpid(), own_folder, [], [])
            limit_processes(20)
        case "non-dumpable":
            take_user_id(os.getpid(), own_folder, [], [])
            hide_process()


def run_in_namespaces(pid: int) -> dict[str, Any]:
    namespaces.adopt_orphans()
    reader, writer = os.pipe()
    worker = namespaces.fork_into_namespaces(without_network=False)
    if worker.pid == 0:
        namespaces.enter_namespaces()
        report = {
            "own pid": os.getpid(),
            "pids": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
            "signal": try_operation(lambda: os.kill(pid, 0)),
        }
        os.write(writer, json.dumps(report).encode())
        os._exit(7)
    os.close(writer)
    with open(reader) as report_file:
        report = json.load(report_file)
    report["exit code"] = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
    os.waitpid(worker.keeper_pid, 0)  # the keeper exits with the worker
    return dict(report)


def try_operation(operation: Callable[[], object]) -> str:
    try:
        operation()
    except OSError as error:
        return type(error).__name__
    return "done"


def call_libc(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc[name](*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def fork_children(num_children: int) -> None:
    """Fork children that live at the same time; raise BlockingIOError if the kernel refuses."""
    child_pids = []
    try:
        for _ in range(num_children):
            child_pid = os.fork()
            if child_pid == 0:
                signal.pause()
            child_pids.append(child_pid)
    finally:
        for child_pid in child_pids:
            os.kill(child_pid, signal.SIGKILL)
            os.waitpid(child_pid, 0)


def read_parent_from_child() -> None:
    """Fork a child that reads this process's variables; raise PermissionError if it cannot."""
    child_pid = os.fork()
    if child_pid == 0:
        try:
            Path(f"/proc/{os.getppid()}/environ").read_bytes()
        except PermissionError:
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1]):
        raise PermissionError


if __name__ == "__main__":
    layer_name, folder_path, secret_path, server_pid, *operation_names = sys.argv[1:]
    json.dump(
        main(layer_name, Path(folder_path), Path(secret_path), int(server_pid), operation_names),
        sys.stdout,
    )
