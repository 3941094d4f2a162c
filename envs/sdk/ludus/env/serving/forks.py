"""Protection of a server's ports in processes that its environment forks.

A forked child inherits all open sockets. It would keep the ports occupied after the server has
exited, and keep connections of clients open.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_protected_ports: Counter[int] = Counter()


def protect_ports(ports: Iterable[int]) -> None:
    """Replace sockets on these ports in processes that are forked from now on."""
    _protected_ports.update(ports)


def unprotect_ports(ports: Iterable[int]) -> None:
    """Undo `protect_ports`."""
    _protected_ports.subtract(ports)


def _replace_sockets() -> None:
    """Replace every socket on a protected port by /dev/null, in the forked child.

    The sockets are not closed, because the objects that own them would later close descriptors
    that were reused.
    """
    ports = {port for port, count in _protected_ports.items() if count > 0}
    if not ports or not _DESCRIPTORS.is_dir():  # only Linux has this folder
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            if _find_port(int(name)) in ports:
                os.dup2(null, int(name), inheritable=False)
    os.close(null)
    _protected_ports.clear()


def _find_port(descriptor: int) -> int:
    """Return the local port of an internet socket, or 0 for other descriptors."""
    if not os.readlink(_DESCRIPTORS / str(descriptor)).startswith("socket:"):
        return 0
    connection = socket.socket(fileno=descriptor)
    try:
        is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
        return int(connection.getsockname()[1]) if is_internet else 0
    finally:
        connection.detach()


os.register_at_fork(after_in_child=_replace_sockets)
