"""Process ids, process groups and capabilities, read from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


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
    """Return the id of this process as its parent sees it, while /proc is still the parent's."""
    with contextlib.suppress(OSError):
        return int(os.readlink("/proc/self"))
    return os.getpid()


def effective_capabilities() -> int:
    """Return the effective capabilities of this process as a bit mask."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return int(mask, 16)
