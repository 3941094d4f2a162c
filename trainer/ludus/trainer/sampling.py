"""The rollout loop: has groups played as fast as the workers can and the staleness bound allows.

    replaced groups --+                                        +--> finished, in the buffer
                      +--> admitted --> place on a worker -----+
    the mixture ------+       ^                                +--> dead, void, lost with its
                              |                                     worker: replaced
                  capacity under the version that all workers hold

The loop waits for capacity (unblocked by `hold`, which a delivery of weights calls, and by
groups that must be replaced), then for a free place on a worker. A group begins when it has its
place, not before: so it is as young as it can be.

The buffer alone knows what has become of a group, since groups go to it from the workers; this
loop knows how it was to be played. Whatever must agree between the two is done while `_changed`
is held.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ludus.proto.config import RunConfig
from ludus.trainer.actors.workers import PLACES_PER_WORKER, Place
from ludus.trainer.background import Background
from ludus.trainer.checkpoint import RunState
from ludus.trainer.data.admission import Admission
from ludus.trainer.data.buffer import BufferState
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.data.mixture import Mixture
from ludus.trainer.types import GroupSpec, RolloutGroup


class PlaysGroups(Protocol):
    """The rollout workers."""

    async def place(self) -> Place: ...

    async def play(self, place: Place, groups: Sequence[GroupSpec]) -> int: ...

    def give_back(self, place: Place) -> None: ...


class HoldsGroups(Protocol):
    """The buffer, as this loop uses it."""

    async def begin(self, indices: Sequence[int], version: int) -> None: ...

    async def settle(self, indices: Sequence[int]) -> list[int]: ...

    async def state(self) -> BufferState: ...

    async def restore(
        self, groups: Sequence[RolloutGroup], counts: Mapping[str, RolloutCounts], version: int
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Groups that have begun and were not trained on, at one moment."""

    unfinished: list[GroupSpec]
    finished: list[RolloutGroup]
    counts: dict[str, RolloutCounts]
    """Since the last batch, by environment."""


class SamplingLoop:
    """Admits groups and has them played, until it is cancelled."""

    def __init__(
        self, run: RunConfig, mixture: Mixture, workers: PlaysGroups, buffer: HoldsGroups
    ) -> None:
        self._mixture = mixture
        self._workers = workers
        self._buffer = buffer
        self._known = frozenset(run.environments)
        self._chunk = max(1, run.rollout.num_groups_in_flight // PLACES_PER_WORKER)
        self._admission = Admission(run.training.groups_per_step, run.training.max_staleness)
        self._held_version: int | None = None
        self._waiting: deque[GroupSpec] = deque()
        """Groups to begin before new ones: unfinished before, or to replace others."""
        self._playing: dict[int, GroupSpec] = {}
        """Groups whose play has not returned, by index."""
        self._changed = asyncio.Condition()
        self._idle_s = 0.0
        self._idle_since_s: float | None = time.monotonic()

    async def restore(self, state: RunState) -> None:
        """Nothing; what is under way is what `state` says, and nothing else."""
        kept = await self._buffer.restore(state.buffered_groups, state.counts, state.step)
        self._admission.num_admitted = state.step * self._admission.groups_per_step + kept
        # A resumed run may play in other environments than before.
        self._waiting.extend(g for g in state.unfinished_groups if g.environment in self._known)

    async def run(self, background: Background) -> None:
        """Nothing, ever; groups are played as tasks of `background`."""
        self.take_idle_s()
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._capacity > 0)
            place = await self._workers.place()
            try:
                specs = await self._admit()
            except BaseException:
                self._workers.give_back(place)
                raise
            background.start(self._play(place, specs))

    async def hold(self, version: int) -> None:
        """Nothing; from now on all workers sample from `version` or a newer one."""
        async with self._changed:
            self._held_version = version
            self._changed.notify_all()

    async def under_way(self) -> UnderWay:
        """All groups that have begun and were not trained on, each of them once."""
        async with self._changed:
            held = await self._buffer.state()
            played = [self._playing[index] for index in held.played]
            self._replace(held.refused)
            self._changed.notify_all()
            return UnderWay([*played, *self._waiting], held.groups, held.counts)

    def take_idle_s(self) -> float:
        """Seconds, since the last call, in which no group was played."""
        now = time.monotonic()
        if self._idle_since_s is not None:
            self._idle_s += now - self._idle_since_s
            self._idle_since_s = now
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    @property
    def _capacity(self) -> int:
        if self._held_version is None:
            return 0
        return self._admission.capacity(self._held_version)

    async def _admit(self) -> list[GroupSpec]:
        """Between one and a chunk of groups, which have begun."""
        async with self._changed:
            assert self._held_version is not None
            specs = [self._next() for _ in range(min(self._chunk, self._capacity))]
            self._admission.admit(len(specs))
            self._playing.update({spec.index: spec for spec in specs})
            self._note_idleness()
            await self._buffer.begin([spec.index for spec in specs], self._held_version)
        return specs

    async def _play(self, place: Place, specs: Sequence[GroupSpec]) -> None:
        num_refused = await self._workers.play(place, specs)
        indices = [spec.index for spec in specs]
        async with self._changed:
            if num_refused:
                self._replace(await self._buffer.settle(indices))
            for index in indices:
                del self._playing[index]
            self._note_idleness()
            self._changed.notify_all()

    def _next(self) -> GroupSpec:
        return self._waiting.popleft() if self._waiting else self._mixture.next_group()

    def _replace(self, indices: Sequence[int]) -> None:
        self._admission.give_back(len(indices))
        self._waiting.extend(self._mixture.replacement(self._playing[i]) for i in sorted(indices))

    def _note_idleness(self) -> None:
        if self._playing:
            self._idle_s = self.take_idle_s()
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = time.monotonic()
