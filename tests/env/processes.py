"""Processes as /proc shows them to tests."""

from __future__ import annotations

import contextlib
from pathlib import Path


def pids() -> list[int]:
    """All of this machine's, also those that have ended and were not waited for."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def lives(pid: int) -> bool:
    """False for a zombie too: it runs nothing any more."""
    return _fields_of(pid)[:1] not in ([], ["Z"])


def children_of(pid: int) -> list[int]:
    """Those that it has not waited for."""
    return [one for one in pids() if _fields_of(one)[1:2] == [str(pid)]]


def arguments_of(pid: int) -> str:
    """Its command line; empty when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def _fields_of(pid: int) -> list[str]:
    """State, parent and what follows; empty when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return []
