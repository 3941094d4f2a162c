"""A user id of its own for each worker: no file, process or signal of another's is its business."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ludus.env.sandbox.kernel import LayerUnavailableError

_FIRST_ID = 61_184
_NUM_IDS = 4_336
"""The ids that systemd, too, takes for services of a moment; a container maps them."""
_NEEDED = {"CHOWN": 0, "DAC_OVERRIDE": 1, "KILL": 5, "SETGID": 6, "SETUID": 7}
"""Capabilities: to hand over a folder, to measure and remove it, to end the worker, to change."""


def take_user_id(
    number: int, folder: Path, readable: Iterable[Path], writable: Iterable[Path]
) -> None:
    """Become a user that nobody else is, who owns the folder.

    Args:
        number: ids differ where these do.
        readable: what must stay so, as the process's own code must.
        writable: what must stay so.

    Raises:
        LayerUnavailableError: this process may not, or could not use one of the paths afterwards.
    """
    _require_capabilities()
    for path in readable:
        _require_open_to_others(path, stat.S_IROTH)
    for path in writable:
        _require_open_to_others(path, stat.S_IROTH | stat.S_IWOTH)
    own = _FIRST_ID + number % _NUM_IDS
    os.chown(folder, own, own)
    os.setgroups([])
    os.setresgid(own, own, own)
    os.setresuid(own, own, own)


def _require_capabilities() -> None:
    if os.geteuid() != 0:
        raise LayerUnavailableError(
            f"only root can take another user id, and this is {os.geteuid()}"
        )
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (held,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    lacking = [name for name, bit in _NEEDED.items() if not int(held, 16) >> bit & 1]
    if lacking:
        raise LayerUnavailableError(f"root lacks the capabilities {', '.join(lacking)} here")


def _require_open_to_others(path: Path, needed: int) -> None:
    if not path.exists():
        return
    found = path.resolve()
    through = [found, *found.parents] if found.is_dir() else found.parents
    for one, mode in ((found, needed), *((folder, stat.S_IXOTH) for folder in through)):
        if one.stat().st_mode & mode != mode:
            raise LayerUnavailableError(f"{one}, which workers need, is closed to other users")
