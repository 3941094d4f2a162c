"""A user id of its own for each worker: no file, process or signal of another's is its business."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ludus.env.sandbox.kernel import NotOfferedError

_FIRST_ID = 61_184
_NUM_IDS = 4_336
"""The ids that systemd, too, takes for services of a moment; a container maps them."""
_NEEDED = {"CHOWN": 0, "DAC_OVERRIDE": 1, "KILL": 5, "SETGID": 6, "SETUID": 7}
"""Capabilities: to hand over a folder, to measure and remove it, to end the worker, to change."""
_READ_BY_OTHERS = stat.S_IROTH | stat.S_IXOTH


def take_user_id(number: int, folder: Path, code: Iterable[Path]) -> None:
    """Become a user that nobody else is, who owns the folder.

    Args:
        number: ids differ where these do.
        code: what must stay readable.

    Raises:
        NotOfferedError: this process may not, or could not read its own code afterwards.
    """
    _require_capabilities()
    for path in code:
        _require_open_to_others(path)
    own = _FIRST_ID + number % _NUM_IDS
    os.chown(folder, own, own)
    os.setgroups([])
    os.setresgid(own, own, own)
    os.setresuid(own, own, own)


def _require_capabilities() -> None:
    if os.geteuid() != 0:
        raise NotOfferedError(f"only root can take another user id, and this is {os.geteuid()}")
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (held,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    lacking = [name for name, bit in _NEEDED.items() if not int(held, 16) >> bit & 1]
    if lacking:
        raise NotOfferedError(f"root lacks the capabilities {', '.join(lacking)} here")


def _require_open_to_others(path: Path) -> None:
    if not path.exists():
        return
    found = path.resolve()
    for one in (found, *found.parents):
        needed = _READ_BY_OTHERS if one == found and one.is_dir() else stat.S_IXOTH
        if one == found and not one.is_dir():
            needed = stat.S_IROTH
        if one.stat().st_mode & needed != needed:
            raise NotOfferedError(f"{one}, with code in it, is closed to other users")
