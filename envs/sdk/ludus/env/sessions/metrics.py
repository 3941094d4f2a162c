"""A SessionCore that counts: opens, steps and how long they take, errors, ends.

Counts are plain integers that cost a step about half a microsecond; `http/health.py` turns them
into metrics when somebody asks.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from ludus.env.encoding import EncodedResult, ResetArgs
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.ends import SessionEnd, end_of
from ludus.env.sessions.hosts import SessionHost
from ludus.env.sessions.interface import OpenArgs, Opened, Owner
from ludus.env.sessions.options import CoreOptions
from ludus.env.types import JsonObject
from ludus.proto.errors import EnvError, ErrorCode

ResultT = TypeVar("ResultT")

STEP_BUCKETS_S = (
    *(0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper bounds, from a step on the event loop to one that waits for tools."""


@dataclass(slots=True, eq=False)
class SessionCounts:
    """What has happened since the process began."""

    num_opened: int = 0
    num_resets: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0
    num_steps_by_bucket: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1))
    """Steps by `STEP_BUCKETS_S`, each once; the last are slower than all bounds."""
    num_errors: dict[ErrorCode, int] = field(default_factory=lambda: dict.fromkeys(ErrorCode, 0))
    num_ends: dict[SessionEnd, int] = field(default_factory=lambda: dict.fromkeys(SessionEnd, 0))

    def stepped(self, duration_s: float) -> None:
        """Counts a step."""
        self.num_steps += 1
        self.step_seconds += duration_s
        self.num_steps_by_bucket[bisect_left(STEP_BUCKETS_S, duration_s)] += 1

    def stepped_together(self, num_steps: int, took_s: float) -> None:
        """Counts steps that were taken one by one, each with its share of the time."""
        self.num_steps += num_steps
        self.step_seconds += took_s
        self.num_steps_by_bucket[bisect_left(STEP_BUCKETS_S, took_s / num_steps)] += num_steps

    def ended(self, session_id: str, reason: str) -> None:
        """Counts a session's end."""
        self.num_ends[end_of(reason)] += 1


class MeteredCore(SessionCore):
    """A SessionCore with `counts`."""

    def __init__(self, host: SessionHost, options: CoreOptions | None = None) -> None:
        super().__init__(host, options)
        self.counts = SessionCounts()
        self.events.on_end.append(self.counts.ended)

    async def open(self, args: OpenArgs, owner: Owner | None = None) -> Opened:
        """A new session; see `Sessions`."""
        opened = await self._counting(super().open(args, owner))
        self.counts.num_opened += 1
        self.counts.num_resets += args.reset is not None
        return opened

    async def open_group_as(
        self, session_ids: list[str], args: OpenArgs, owner: Owner | None = None
    ) -> list[Opened]:
        """Sessions on one seed, all or none; see `Sessions`."""
        opened = await self._counting(super().open_group_as(session_ids, args, owner))
        self.counts.num_opened += len(opened)
        self.counts.num_resets += len(opened)  # a group always begins with a reset
        return opened

    async def reset(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """The first answer of a new episode."""
        if self.runs_inline:
            return self.reset_now(session_id, args)
        result = await self._counting(super().reset(session_id, args))
        self.counts.num_resets += 1
        return result

    async def step(
        self, session_id: str, action: bytes | str, step_index: int = 0, timeout_s: float = 0.0
    ) -> EncodedResult:
        """The answer to an action; see `Sessions`."""
        if self.runs_inline:
            return self.step_now(session_id, action, step_index)
        begun_s = time.perf_counter()
        step = super().step(session_id, action, step_index, timeout_s)
        result = await self._counting(step)
        self.counts.stepped(time.perf_counter() - begun_s)
        return result

    def step_now(self, session_id: str, action: bytes | str, step_index: int = 0) -> EncodedResult:
        """The same without a wait, for environments that step on the event loop."""
        begun_s = time.perf_counter()
        try:
            result = super().step_now(session_id, action, step_index)
        except EnvError as error:
            self.counts.num_errors[error.code] += 1
            raise
        self.counts.stepped(time.perf_counter() - begun_s)
        return result

    def reset_now(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """The same without a wait, for environments that step on the event loop."""
        try:
            result = super().reset_now(session_id, args)
        except EnvError as error:
            self.counts.num_errors[error.code] += 1
            raise
        self.counts.num_resets += 1
        return result

    def count_steps(self, num_steps: int, took_s: float) -> None:
        """Told of steps that were taken one by one in so many seconds together."""
        self.counts.stepped_together(num_steps, took_s)

    def count_error(self, code: ErrorCode) -> None:
        """Told of a step that failed."""
        self.counts.num_errors[code] += 1

    async def state(self, session_id: str) -> bytes:
        """The environment's state as JSON."""
        return await self._counting(super().state(session_id))

    async def call_tool(self, session_id: str, name: str, arguments: JsonObject) -> bytes:
        """What a tool of the environment returned, as JSON."""
        return await self._counting(super().call_tool(session_id, name, arguments))

    async def _counting(self, call: Awaitable[ResultT]) -> ResultT:
        try:
            return await call
        except EnvError as error:
            self.counts.num_errors[error.code] += 1
            raise
