"""Process ids, groups and privileges, and a separate user id for each worker."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from ludus.env.sandbox import kernel
from ludus.env.sandbox.kernel import LayerUnavailableError

with contextlib.suppress(ImportError):  # Windows has none, but the command line runs there
    import resource

_FIRST_ID = 61_184
_NUM_IDS = 4_336
"""The range of systemd's dynamic service users, which containers map."""
_NEEDED_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "KILL": 5, "SETGID": 6, "SETUID": 7}
"""Capabilities to hand over, measure and remove a folder, kill a worker, and change user."""


def kill_group(pid: int) -> None:
    """Kill the process and its group."""
    for send_signal in (os.killpg, os.kill):  # a process that has just started has no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send_signal(pid, signal.SIGKILL)


def kill_child_processes() -> None:
    """Kill all child processes, then their orphans if this process adopts them."""
    while child_pids := list_child_pids():
        for pid in child_pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def list_child_pids() -> set[int]:
    """Return the ids of all child processes, including those that have exited."""
    with contextlib.suppress(OSError):
        return set(map(int, Path("/proc/thread-self/children").read_text().split()))
    return set()


def find_outer_pid() -> int:
    """Return this process's id in its parent's namespace. Call it before /proc is remounted."""
    with contextlib.suppress(OSError):
        return int(os.readlink("/proc/self"))
    return os.getpid()


def read_effective_capabilities() -> int:
    """Return the effective capabilities of this process as a bit mask."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return int(mask, 16)


def hide_process() -> None:
    """Hide environment variables, memory and descriptors from the user's other processes.

    Root processes with CAP_SYS_PTRACE can still read them. A child that executes another program
    is no longer hidden.
    """
    if sys.platform.startswith("linux"):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def show_process() -> None:
    """Undo `hide_process`. The kernel lets only a visible process map a user namespace."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def give_up_privileges() -> None:
    """Give up all capabilities, for this process and its descendants.

    Set-user-id programs and programs with file capabilities cannot restore them.
    """
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.drop_capabilities()


def limit_processes(max_processes: int, *, counts_other_processes: bool = False) -> None:
    """Limit the number of processes and threads of this process's user id; 0 sets no limit.

    Raises:
        LayerUnavailableError: processes outside the sandbox would count too.
    """
    if not max_processes:
        return
    if counts_other_processes:
        raise LayerUnavailableError("other processes have the same user id and would count too")
    hard_limit = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if hard_limit != resource.RLIM_INFINITY:
        max_processes = min(max_processes, hard_limit)
    resource.setrlimit(resource.RLIMIT_NPROC, (max_processes, max_processes))


def take_user_id(
    worker_pid: int, folder: Path, readable_paths: Iterable[Path], writable_paths: Iterable[Path]
) -> None:
    """Change to a user id that no other process has, and make it own the folder.

    Workers with different process ids usually get different user ids.

    Raises:
        LayerUnavailableError: this process lacks the rights, or would lose one of the paths.
    """
    _require_capabilities()
    for path in readable_paths:
        _require_open_to_others(path, stat.S_IROTH)
    for path in writable_paths:
        _require_open_to_others(path, stat.S_IROTH | stat.S_IWOTH)
    user_id = _FIRST_ID + worker_pid % _NUM_IDS
    os.chown(folder, user_id, user_id)
    os.setgroups([])
    os.setresgid(user_id, user_id, user_id)
    os.setresuid(user_id, user_id, user_id)


def _require_capabilities() -> None:
    if os.geteuid() != 0:
        raise LayerUnavailableError(
            f"changing the user id needs root, but this process has user id {os.geteuid()}"
        )
    capabilities = read_effective_capabilities()
    missing_names = [
        name for name, bit in _NEEDED_CAPABILITIES.items() if not capabilities >> bit & 1
    ]
    if missing_names:
        raise LayerUnavailableError(f"root lacks the capabilities {', '.join(missing_names)} here")


def _require_open_to_others(path: Path, needed_mode: int) -> None:
    if not path.exists():
        return
    resolved_path = path.resolve()
    folders = [resolved_path] if resolved_path.is_dir() else []
    needed_modes = [(folder, stat.S_IXOTH) for folder in (*folders, *resolved_path.parents)]
    for checked_path, mode in [(resolved_path, needed_mode), *needed_modes]:
        if checked_path.stat().st_mode & mode != mode:
            message = f"{checked_path}, which workers need, is closed to other users"
            raise LayerUnavailableError(message)
