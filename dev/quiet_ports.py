"""Ports for programs that cannot choose one themselves, free now and still when they are used.

A port that the system gives out, it gives to somebody else as soon as it is free again. These lie
below those that it gives out.
"""

from __future__ import annotations

import itertools
import random
import socket

_QUIET_PORTS = range(20_000, 30_000)


def quiet_ports(count: int) -> list[int]:
    """So many ports of 127.0.0.1 on which nobody listens."""
    candidates = random.SystemRandom().sample(_QUIET_PORTS, len(_QUIET_PORTS))
    return list(itertools.islice(filter(_is_free, candidates), count))


def _is_free(port: int) -> bool:
    with socket.socket() as own:
        try:
            own.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
