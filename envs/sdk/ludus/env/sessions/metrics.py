"""Counts of a server's sessions: opens, steps and their durations, errors, ends, workers.

Counts are plain integers that cost a step less than half a microsecond. `http/health.py` turns
them into metrics on request.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ludus.env.sandbox.confine import Layer
from ludus.env.sessions.tombstones import SessionEnd
from ludus.proto.errors import EnvError, ErrorCode

STEP_BUCKETS_S = (
    *(0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper bounds of step durations."""


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """Counts of a host's worker processes."""

    num_workers: int
    """Number of workers that are alive."""
    num_ends: int
    """Number of workers that died or were killed since the host started."""
    layers: Mapping[Layer, bool] = field(default_factory=dict)
    """Layers of the sandbox, and whether each is active."""


@dataclass(slots=True, eq=False)
class SessionCounts:
    """Counts since the process started."""

    num_opened: int = 0
    num_resets: int = 0
    step_seconds: float = 0.0
    num_steps_by_bucket: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1))
    """Steps by `STEP_BUCKETS_S`; the last bucket is for steps above all bounds."""
    num_errors: dict[ErrorCode, int] = field(default_factory=lambda: dict.fromkeys(ErrorCode, 0))
    num_ends: dict[SessionEnd, int] = field(default_factory=lambda: dict.fromkeys(SessionEnd, 0))

    @property
    def num_steps(self) -> int:
        """Number of finished steps."""
        return sum(self.num_steps_by_bucket)

    def count_step(self, duration_s: float) -> None:
        """Count a step."""
        self.step_seconds += duration_s

        self.num_steps_by_bucket[bisect_left(STEP_BUCKETS_S, duration_s)] += 1

    @contextlib.contextmanager
    def count_errors(self) -> Iterator[None]:
        """Count the error that the block raises, if any."""
        try:
            yield
        except EnvError as error:
            self.num_errors[error.code] += 1
            raise
