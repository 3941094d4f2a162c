"""The rollout loop: has groups played as fast as the workers can and the staleness bound allows.

    replaced groups --+                                       +--> finished, in the buffer
                      +--> admitted --> slot on a worker -----+
    the mixture ------+       ^                               +--> zero-variance, void, lost
                              |                                    with its worker: replaced
                  capacity under the version that all workers hold

The loop waits for capacity (unblocked by `hold`, which a delivery of weights calls, and by
groups that must be replaced), then for a free slot on a worker. A group begins when it has its
slot, not before: so it is as young as it can be.

The buffer alone knows what has become of a group, since groups go to it from the workers; this
loop knows how it was to be played. Whatever must agree between the two is done while `_changed`
is held. A group that is refused is replaced by whoever hears of it first: its own task, or a
checkpoint that is written meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ludus.proto.config import LanguageModelRun
from ludus.trainer.actors.processes import Buffer, Slot, Workers
from ludus.trainer.core.tasks import Tasks
from ludus.trainer.core.types import GroupSpec, RolloutGroup
from ludus.trainer.data.admission import Admission
from ludus.trainer.data.buffer import Refusal
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.data.mixture import Mixture
from ludus.trainer.run.checkpoint import RunState


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
        self, run: LanguageModelRun, mixture: Mixture, workers: Workers, buffer: Buffer
    ) -> None:
        self._mixture = mixture
        self._workers = workers
        self._buffer = buffer
        self._known = frozenset(run.environments)
        training = run.training
        whole = training.num_steps * training.groups_per_step
        self._admission = Admission(
            training.groups_per_step,
            training.max_staleness,
            num_groups=None if training.num_epochs is None else whole,
        )
        self._held_version: int | None = None
        self._waiting: deque[GroupSpec] = deque()
        """Groups to begin before new ones: unfinished before, or to replace others."""
        self._playing: dict[int, GroupSpec] = {}
        """Groups whose play has not returned, by index; none that was replaced already."""
        self._changed = asyncio.Condition()
        self._idle_s = 0.0
        self._idle_since_s: float | None = time.monotonic()

    async def restore(self, state: RunState) -> None:
        """Take over what is under way from `state`; there is nothing else."""
        kept = await self._buffer.restore(state.buffered_groups, state.counts, state.step)
        self._admission.num_admitted = state.step * self._admission.groups_per_step + kept
        # A resumed run may play in other environments than before.
        self._waiting.extend(g for g in state.unfinished_groups if g.environment in self._known)

    async def run(self, tasks: Tasks) -> None:
        """Admit groups for ever; they are played as `tasks`."""
        self.take_idle_s()
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._capacity > 0)
            slot = await self._workers.slot()
            try:
                specs = await self._admit(slot.size)
            except BaseException:
                self._workers.free(slot)
                raise
            tasks.start(self._play(slot, specs))

    async def hold(self, version: int) -> None:
        """Admit for `version`: from now on all workers sample from it or a newer one."""
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

    def outside_buffer(self) -> list[GroupSpec]:
        """The groups that have begun and do not wait in the buffer, which is lost.

        What is played gets new indices: some of it may have been trained on, unheard.
        """
        return [*map(self._mixture.renewed, self._playing.values()), *self._waiting]

    def in_words(self) -> str:
        """Which groups are being played, and by whom."""
        playing = Counter(spec.environment for spec in self._playing.values())
        groups = ", ".join(f"{number} in '{name}'" for name, number in sorted(playing.items()))
        return f"groups being played: {groups or 'none'}; {self._workers.in_words()}"

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

    async def _admit(self, most: int) -> list[GroupSpec]:
        """Between one and `most` groups, which have begun."""
        async with self._changed:
            assert self._held_version is not None
            specs = [self._next() for _ in range(min(most, self._capacity))]
            self._admission.admit(len(specs))
            self._playing.update({spec.index: spec for spec in specs})
            self._note_idleness()
            await self._buffer.begin([spec.index for spec in specs], self._held_version)
        return specs

    async def _play(self, slot: Slot, specs: Sequence[GroupSpec]) -> None:
        refused = await self._workers.play(slot, specs)
        async with self._changed:
            self._replace(refused)
            for spec in specs:
                self._playing.pop(spec.index, None)
            self._note_idleness()
            self._changed.notify_all()

    def _next(self) -> GroupSpec:
        return self._waiting.popleft() if self._waiting else self._mixture.next_group()

    def _replace(self, refusals: Sequence[Refusal]) -> None:
        for refused in sorted(refusals, key=lambda one: one.index):
            spec = self._playing.pop(refused.index, None)
            if spec is not None:
                self._admission.give_back(1)
                self._waiting.append(self._mixture.replacement(spec, is_lost=refused.is_lost))

    def _note_idleness(self) -> None:
        if self._playing:
            self._idle_s = self.take_idle_s()
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = time.monotonic()
