"""The replay buffer as a Ray actor: workers put, the training loop takes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ludus.trainer.data.buffer import GroupBuffer, RolloutCounts
from ludus.trainer.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class TakenGroups:
    """A batch's groups, and what the buffer saw since the last batch."""

    groups: list[RolloutGroup]
    counts: RolloutCounts
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

    async def take(self, num_groups: int, version: int, timeout_s: float) -> TakenGroups | None:
        """The oldest groups, none more than S versions older than `version`.

        None after `timeout_s` without enough of them, or when stale groups were dropped and
        the rest is too few: the caller admits replacements and asks again.
        """
        async with self._changed:
            num_stale = self._buffer.drop_stale(version)
            if num_stale and len(self._buffer) < num_groups:
                return TakenGroups([], RolloutCounts(), len(self._buffer), num_stale)
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: len(self._buffer) >= num_groups)
            except TimeoutError:
                return None
            groups = self._buffer.take(num_groups)
            counts = self._buffer.take_counts()
            return TakenGroups(groups, counts, len(self._buffer), num_stale)

    async def groups(self) -> tuple[RolloutGroup, ...]:
        """The waiting groups, oldest first, for a checkpoint."""
        return self._buffer.groups
