"""Functions for the ids, groups and privileges of processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from ludus.env.sandbox import kernel


def kill_group(pid: int) -> None:
    """Kill the process and its group."""
    for kill in (os.killpg, os.kill):  # a process that has just started has no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def child_pids() -> set[int]:
    """Return the ids of all child processes, including those that have exited."""
    with contextlib.suppress(OSError):
        return set(map(int, Path("/proc/thread-self/children").read_text().split()))
    return set()


def pid_outside_namespace() -> int:
    """Return this process's id in its parent's namespace. Call it before /proc is remounted."""
    with contextlib.suppress(OSError):
        return int(os.readlink("/proc/self"))
    return os.getpid()


def effective_capabilities() -> int:
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
