"""Pauses between the attempts of a retry loop."""

from __future__ import annotations

from collections.abc import Iterator


def doubling(first_s: float, last_s: float) -> Iterator[float]:
    """Yield pauses without end: `first_s`, then twice the previous pause, up to `last_s`."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, last_s)
