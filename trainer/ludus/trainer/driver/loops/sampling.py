"""The sampling loop: has groups played as fast as workers and staleness limit allow.

    replacements -----+                                       +--> finished: in the buffer
                      +--> admitted --> slot on a worker -----+
    the mixture ------+       ^                               +--> zero-variance, void or lost:
                              |                                    replaced
                  capacity for the version that all workers hold

The loop waits for capacity, then for a free slot on a worker. A delivery of weights and a group
that must be replaced both give new capacity. A group starts only when it has its slot, so that it
uses the newest possible weights.

Groups go from the workers straight to the buffer, so only the buffer knows what became of a group.
This loop knows which groups are being played. `_changed` is held while the two must agree. A
refused group is replaced by the first that learns of it: the task that played it, or a checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import BufferLostError
from ludus.trainer.actors.processes import Buffer, Slot, Workers
from ludus.trainer.core.tasks import Tasks
from ludus.trainer.core.types import GroupSpec
from ludus.trainer.data.buffer import GroupAdmission, Refusal
from ludus.trainer.data.mixture import Mixture
from ludus.trainer.run.checkpoint import RunState


class SamplingLoop:
    """Admits groups and has them played until it is cancelled."""

    def __init__(
        self, run: LanguageModelRun, mixture: Mixture, workers: Workers, buffer: Buffer
    ) -> None:
        self._mixture = mixture
        self._workers = workers
        self._buffer = buffer
        self._environments = frozenset(run.environments)
        training = run.training
        num_groups = training.num_steps * training.groups_per_step
        self._admission = GroupAdmission(
            training.groups_per_step,
            training.max_staleness,
            num_groups=None if training.num_epochs is None else num_groups,
        )
        self._held_version: int | None = None
        self._waiting: deque[GroupSpec] = deque()
        """Groups to start before new groups: resumed groups and replacements."""
        self._playing: dict[int, GroupSpec] = {}
        """Groups being played and not yet replaced, by index."""
        self._changed = asyncio.Condition()
        self._idle_s = 0.0
        self._idle_since_s: float | None = time.monotonic()

    async def restore(self, state: RunState) -> None:
        """Take over the pending groups of `state`, when there are no others."""
        num_kept = await self._buffer.restore(state.buffered_groups, state.counts, state.step)
        self._admission.num_admitted = state.step * self._admission.groups_per_step + num_kept
        # A resumed run may have other environments.
        self._waiting.extend(
            spec for spec in state.unfinished_groups if spec.environment in self._environments
        )

    async def run(self, tasks: Tasks) -> None:
        """Admit groups until cancelled; each slot of groups is played as one of `tasks`."""
        self.take_idle_s()
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._capacity > 0)
            slot = await self._workers.acquire_slot()
            try:
                specs = await self._admit(slot.size)
            except BaseException:
                slot.release()
                raise
            tasks.start(self._play(slot, specs))

    async def set_held_version(self, version: int) -> None:
        """Admit groups for `version`, which all workers now sample from."""
        async with self._changed:
            self._held_version = version
            self._changed.notify_all()

    async def copy_state(self, state: RunState) -> RunState:
        """Return a copy of the state with the groups that were started and not yet trained on.

        If the buffer is lost, its groups are missing. Groups being played then get new indices,
        because some of them may have been trained on.
        """
        async with self._changed:
            try:
                buffer = await self._buffer.state()
            except BufferLostError:
                playing = [self._mixture.reissue_group(spec) for spec in self._playing.values()]
                copy = state.model_copy(deep=True)
                copy.unfinished_groups += [*playing, *self._waiting]
                return copy
            playing = [self._playing[index] for index in buffer.played]
            self._replace(buffer.refused)
            self._changed.notify_all()
            copy = state.model_copy(deep=True)
            copy.unfinished_groups = [*playing, *self._waiting]
            copy.buffered_groups, copy.counts = buffer.groups, buffer.counts
            return copy

    def describe(self) -> str:
        """Describe which groups are being played, and the state of the workers."""
        playing = Counter(spec.environment for spec in self._playing.values())
        groups = ", ".join(f"{number} in '{name}'" for name, number in sorted(playing.items()))
        return f"groups being played: {groups or 'none'}; {self._workers.describe()}"

    def take_idle_s(self) -> float:
        """Return the seconds since the last call in which no group was played."""
        now_s = time.monotonic()
        if self._idle_since_s is not None:
            self._idle_s += now_s - self._idle_since_s
            self._idle_since_s = now_s
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    @property
    def _capacity(self) -> int:
        if self._held_version is None:
            return 0
        return self._admission.capacity(self._held_version)

    async def _admit(self, max_groups: int) -> list[GroupSpec]:
        """Start between one and `max_groups` groups and return them."""
        async with self._changed:
            assert self._held_version is not None
            specs = [self._next_group() for _ in range(min(max_groups, self._capacity))]
            self._admission.admit(len(specs))
            self._playing.update({spec.index: spec for spec in specs})
            self._update_idle_time()
            await self._buffer.begin([spec.index for spec in specs], self._held_version)
        return specs

    async def _play(self, slot: Slot, specs: Sequence[GroupSpec]) -> None:
        refusals = await slot.play(specs)
        async with self._changed:
            self._replace(refusals)
            for spec in specs:
                self._playing.pop(spec.index, None)
            self._update_idle_time()
            self._changed.notify_all()

    def _next_group(self) -> GroupSpec:
        return self._waiting.popleft() if self._waiting else self._mixture.next_group()

    def _replace(self, refusals: Sequence[Refusal]) -> None:
        for refusal in sorted(refusals, key=lambda refusal: refusal.index):
            spec = self._playing.pop(refusal.index, None)
            if spec is not None:
                self._admission.release(1)
                self._waiting.append(self._mixture.replace_group(spec, is_lost=refusal.is_lost))

    def _update_idle_time(self) -> None:
        if self._playing:
            self._idle_s = self.take_idle_s()
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = time.monotonic()
