"""Free ports for programs that cannot choose a port themselves.

The ports are below the range from which the system assigns ports, so that they are still free when
the program starts.
"""

from __future__ import annotations

import itertools
import random
import socket

_QUIET_PORTS = range(20_000, 30_000)


def quiet_ports(count: int) -> list[int]:
    """Return unused ports of 127.0.0.1."""
    candidates = random.SystemRandom().sample(_QUIET_PORTS, len(_QUIET_PORTS))
    return list(itertools.islice(filter(_is_free, candidates), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
