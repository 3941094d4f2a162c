"""How long to wait before what failed is tried again."""

from __future__ import annotations

from collections.abc import Iterator


def doubling(first_s: float, last_s: float) -> Iterator[float]:
    """Pauses for a loop that tries again: each twice the one before, up to the last, for ever."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, last_s)
