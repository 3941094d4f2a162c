"""Waiting in tests: for a condition, never for a time; where a time must pass, it is told to."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

import pytest

from ludus.env.sessions import core as core_module
from ludus.env.sessions.core import SessionCore
from ludus.env.workers.host import WorkerHost


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


def limit_steps(core: SessionCore, limit_s: float) -> None:
    """From now on; what a test prepares is then bound by no limit that is short."""
    core.options = dataclasses.replace(core.options, step_timeout_s=limit_s)
    if isinstance(core.host, WorkerHost):
        core.host.step_timeout_s = limit_s


def detached(core: SessionCore) -> set[str]:
    """Sessions that outlived their connections and end after their linger."""
    return {one.id for one in core.open_sessions.values() if one.detached_s is not None}


def busy(core: SessionCore) -> set[str]:
    """Sessions of which a call is under way off the event loop."""
    return {one.id for one in core.open_sessions.values() if one.lock.locked()}


class CoreClock:
    """The clock by which every core of this process ends its sessions, soon after they are due."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead_s = 0.0
        monkeypatch.setattr(core_module, "time", self)
        monkeypatch.setattr(core_module, "_MAX_SWEEP_PAUSE_S", 0.05)

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def move_on(self, span_s: float) -> None:
        self._ahead_s += span_s


def move_loop_clock(span_s: float) -> None:
    """Let this event loop's timers run out as if that time had passed; no other clock moves."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + span_s
