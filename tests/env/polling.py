"""Functions that wait for conditions, and clocks that tests advance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from ludus.env.sessions import core as core_module
from ludus.env.sessions.core import SessionCore
from ludus.env.workers.host import WorkerHost


async def wait_until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until the condition is true; fail the test after `within_s` seconds."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"the condition was not true within {within_s} s"
        await asyncio.sleep(0.005)


async def wait_for_sessions(core: SessionCore, num_sessions: int) -> None:
    """Wait until `num_sessions` sessions are open. Closing a connection takes a moment."""
    deadline_s = time.monotonic() + 60.0
    while core.load.num_sessions != num_sessions:
        num_open = core.load.num_sessions
        assert time.monotonic() < deadline_s, f"expected {num_sessions} sessions, got {num_open}"
        await asyncio.sleep(0.005)


async def run_pending_tasks(num_turns: int = 20) -> None:
    """Yield to the event loop often enough for all runnable tasks to run."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


def limit_steps(core: SessionCore, limit_s: float) -> None:
    """Set the time limit of later steps, so that it does not apply to the test's setup."""
    core.options = core.options.model_copy(update={"step_timeout_s": limit_s})
    if isinstance(core.host, WorkerHost):
        core.host.step_timeout_s = limit_s


def find_detached_sessions(core: SessionCore) -> set[str]:
    """Return the ids of lingering sessions without a connection."""
    return {session.id for session in core.open_sessions.values() if session.detached_s is not None}


def find_busy_sessions(core: SessionCore) -> set[str]:
    """Return the ids of sessions with a running call outside the event loop."""
    return {session.id for session in core.open_sessions.values() if session.lock.locked()}


class CoreClock:
    """A clock for the expiry of sessions, used by every session core in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._offset_s = 0.0
        monkeypatch.setattr(core_module, "time", self)
        monkeypatch.setattr(core_module, "_MAX_SWEEP_PAUSE_S", 0.05)

    def monotonic(self) -> float:
        return time.monotonic() + self._offset_s

    def advance(self, span_s: float) -> None:
        self._offset_s += span_s


def advance_loop_clock(span_s: float) -> None:
    """Advance only this event loop's clock."""
    loop = asyncio.get_running_loop()
    original_time = loop.time
    loop.time = lambda: original_time() + span_s
