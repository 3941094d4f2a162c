"""Functions that read processes from /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path


def list_pids() -> list[int]:
    """Return the ids of all processes, including zombies."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    return _read_stat(pid)[:1] not in ([], ["Z"])


def list_child_pids(pid: int) -> list[int]:
    """Return the ids of a process's children, including zombies."""
    return [child_pid for child_pid in list_pids() if _read_stat(child_pid)[1:2] == [str(pid)]]


def read_command_line(pid: int) -> str:
    """Return the command line of a process, or an empty string if it has exited."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, or [] if the process has exited."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return []
