"""A separate user id for each worker, without access to files and processes of others."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ludus.env.sandbox.kernel import LayerUnavailableError
from ludus.env.sandbox.processes import effective_capabilities

_FIRST_ID = 61_184
_NUM_IDS = 4_336
"""The range of systemd's dynamic service users, which containers map."""
_NEEDED = {"CHOWN": 0, "DAC_OVERRIDE": 1, "KILL": 5, "SETGID": 6, "SETUID": 7}
"""Capabilities to hand over, measure and remove a folder, kill a worker, and change user."""


def take_user_id(
    number: int, folder: Path, readable: Iterable[Path], writable: Iterable[Path]
) -> None:
    """Change to a user id that no other process has, and make it own the folder.

    Args:
        number: number of the worker; different numbers give different ids.
        readable: paths that must stay readable, such as the process's code.
        writable: paths that must stay writable.

    Raises:
        LayerUnavailableError: this process lacks the rights, or would lose one of the paths.
    """
    _require_capabilities()
    for path in readable:
        _require_open_to_others(path, stat.S_IROTH)
    for path in writable:
        _require_open_to_others(path, stat.S_IROTH | stat.S_IWOTH)
    user_id = _FIRST_ID + number % _NUM_IDS
    os.chown(folder, user_id, user_id)
    os.setgroups([])
    os.setresgid(user_id, user_id, user_id)
    os.setresuid(user_id, user_id, user_id)


def _require_capabilities() -> None:
    if os.geteuid() != 0:
        raise LayerUnavailableError(
            f"changing the user id needs root, but this process has user id {os.geteuid()}"
        )
    capabilities = effective_capabilities()
    lacking = [name for name, bit in _NEEDED.items() if not capabilities >> bit & 1]
    if lacking:
        raise LayerUnavailableError(f"root lacks the capabilities {', '.join(lacking)} here")


def _require_open_to_others(path: Path, needed: int) -> None:
    if not path.exists():
        return
    target = path.resolve()
    parents = [target, *target.parents] if target.is_dir() else target.parents
    needed_modes = ((target, needed), *((folder, stat.S_IXOTH) for folder in parents))
    for entry, mode in needed_modes:
        if entry.stat().st_mode & mode != mode:
            raise LayerUnavailableError(f"{entry}, which workers need, is closed to other users")
