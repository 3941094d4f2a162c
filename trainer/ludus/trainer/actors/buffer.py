"""The replay buffer as a Ray actor: workers put, the training loop takes.

    driver    begin ------------------> [ played ]
    workers   put --------------------> [ waits ] ---- take ----> driver
    driver    settle <-- to be replaced

`take` waits for `put` and `settle`; nothing waits for `take` but admission, in the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ludus.env.runtime import freeze_heap
from ludus.proto.config import RunConfig
from ludus.trainer.data.buffer import BufferState, GroupBuffer
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class TakenGroups:
    """A batch's groups, or none yet, and what the buffer saw since the last batch."""

    groups: list[RolloutGroup]
    """training.groups_per_step of them, by index, or none."""
    counts: dict[str, RolloutCounts]
    """Since the last batch, by environment; they start again when groups are taken."""
    depth: int
    """Groups that still wait."""


class BufferActor:
    """Holds groups from their beginning to their training; calls interleave on one event loop."""

    def __init__(self, run: RunConfig) -> None:
        self._buffer = GroupBuffer(
            groups_per_step=run.training.groups_per_step,
            max_staleness=run.training.max_staleness,
            window_fraction=run.training.window_fraction,
            keep_zero_variance_groups=run.algorithm.zero_variance_groups == "keep",
        )
        self._changed = asyncio.Condition()
        self._num_restored = 0
        freeze_heap()

    async def begin(self, indices: Sequence[int], version: int) -> None:
        """Nothing; these groups are played from now on, by weights `version` or newer ones."""
        self._buffer.begin(indices, version)

    async def put(self, groups: list[RolloutGroup]) -> int:
        """The number of groups that are not taken in; `settle` says which must be replaced."""
        num_refused = self._buffer.put(groups)
        await self._note_change()
        return num_refused

    async def settle(self, indices: Sequence[int]) -> list[int]:
        """Those of `indices`, none of which is played any more, that must be replaced."""
        settled = self._buffer.settle(indices)
        await self._note_change()
        return settled

    async def take(self, version: int, timeout_s: float) -> TakenGroups:
        """The groups of batch `version`; none when they cannot be taken within `timeout_s`."""
        groups: list[RolloutGroup] = []
        num_restored = self._num_restored

        def is_over() -> bool:
            if self._num_restored != num_restored:
                # Who asked was about to train on what is no longer held, and asks no more.
                return True
            groups.extend(self._buffer.take(version))
            return bool(groups)

        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(is_over)
        counts = self._buffer.take_counts() if groups else self._buffer.counts
        return TakenGroups(groups, counts, len(self._buffer))

    async def state(self) -> BufferState:
        """All that is held; the refused groups count as asked for."""
        return self._buffer.state()

    async def restore(
        self,
        groups: Sequence[RolloutGroup],
        counts: Mapping[str, RolloutCounts],
        version: int,
    ) -> int:
        """See GroupBuffer.restore."""
        self._num_restored += 1
        return self._buffer.restore(groups, counts, version)

    async def _note_change(self) -> None:
        async with self._changed:
            self._changed.notify_all()
