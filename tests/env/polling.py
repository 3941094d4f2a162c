"""Waiting in tests: for a condition, never for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ludus.env.sessions.core import SessionCore


async def eventually(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until the condition holds; fail the test when it does not in time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        await asyncio.sleep(0.005)


async def settled(core: SessionCore, num_sessions: int) -> None:
    """Wait until there are so many sessions; connections take a moment to end."""
    deadline_s = time.monotonic() + 60.0
    while core.load.num_sessions != num_sessions:
        found = core.load.num_sessions
        assert time.monotonic() < deadline_s, f"expected {num_sessions} sessions, got {found}"
        await asyncio.sleep(0.005)


async def turns_of_the_loop(num_turns: int = 20) -> None:
    """Let every task run that can; what has not happened then waits for something."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


def detached(core: SessionCore) -> set[str]:
    """Sessions that outlived their connections and end after their linger."""
    return {one.id for one in core._entries.values() if one.detached_s is not None}
