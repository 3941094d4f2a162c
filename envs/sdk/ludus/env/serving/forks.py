"""Processes that an environment forks from its server: they keep none of the server's ports.

A forked child has all that its parent has open. It would keep the ports taken when the server is
gone, and connections of clients open that nobody answers.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_own_ports: Counter[int] = Counter()


def withhold(ports: Iterable[int]) -> None:
    """Keep children that are forked from now on from these ports."""
    _own_ports.update(ports)


def release(ports: Iterable[int]) -> None:
    """Take back what `withhold` said."""
    _own_ports.subtract(ports)


def _let_go() -> None:
    """In the child: put nothing in the place of every socket on the ports.

    They are not closed, because the objects that own them would later close what came after.
    """
    ports = {port for port, count in _own_ports.items() if count > 0}
    if not ports or not _DESCRIPTORS.is_dir():  # only Linux has it
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # the folder's own, which is closed by now
            if _port_of(int(name)) in ports:
                os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)
    _own_ports.clear()


def _port_of(descriptor: int) -> int:
    """The local port of an internet socket; 0 of all else."""
    if not os.readlink(_DESCRIPTORS / str(descriptor)).startswith("socket:"):
        return 0
    one = socket.socket(fileno=descriptor)
    try:
        is_internet = one.family in (socket.AF_INET, socket.AF_INET6)
        return int(one.getsockname()[1]) if is_internet else 0
    finally:
        one.detach()


os.register_at_fork(after_in_child=_let_go)
