"""The replay buffer as a Ray actor: workers put, the training loop takes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from ludus.trainer.data.buffer import GroupBuffer, RolloutCounts
from ludus.trainer.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class TakenGroups:
    """A batch's groups, or none yet, and what the buffer saw since the last batch."""

    groups: list[RolloutGroup]
    """As many as were asked for, or none."""
    counts: RolloutCounts
    """Since the last batch; they start anew when groups are taken."""
    depth: int
    """Groups that still wait."""
    num_stale: int
    """Groups dropped for their age; they must be replaced."""


class BufferActor:
    """Holds finished groups; its calls interleave on one event loop."""

    def __init__(self, *, max_staleness: int, keep_dead_groups: bool) -> None:
        self._buffer = GroupBuffer(max_staleness=max_staleness, keep_dead_groups=keep_dead_groups)
        self._changed = asyncio.Condition()

    async def put(self, groups: list[RolloutGroup]) -> int:
        """The number of groups that were not taken in and must be replaced."""
        async with self._changed:
            num_refused = self._buffer.put(groups)
            self._changed.notify_all()
        return num_refused

    async def take(self, num_groups: int, version: int, timeout_s: float) -> TakenGroups:
        """The oldest groups, none more than S versions older than `version`.

        Without groups after `timeout_s`, or at once when dropping stale ones left too few:
        the caller has replacements played and asks again.
        """
        async with self._changed:
            num_stale = self._buffer.drop_stale(version)
            if num_stale == 0:
                await self._wait_for(num_groups, timeout_s)
                # A straggler may have come in while this waited.
                num_stale = self._buffer.drop_stale(version)
            if len(self._buffer) < num_groups:
                return TakenGroups([], self._buffer.counts, len(self._buffer), num_stale)
            groups = self._buffer.take(num_groups)
            return TakenGroups(groups, self._buffer.take_counts(), len(self._buffer), num_stale)

    async def _wait_for(self, num_groups: int, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait_for(lambda: len(self._buffer) >= num_groups)

    async def groups(self) -> tuple[RolloutGroup, ...]:
        """The waiting groups, oldest first, for a checkpoint."""
        return self._buffer.groups
