"""The sampling loop, which has groups played as fast as workers and staleness limit allow.

    replacements -----+                                       +--> finished: in the buffer
                      +--> admitted --> slot on a worker -----+
    the mixture ------+       ^                               +--> zero-variance, void or lost:
                              |                                    replaced
                  capacity for the delivered version

The loop waits for capacity, then for a free slot on a worker. A delivery of weights and a group
that must be replaced both give new capacity. A group starts only when it has its slot, so that it
uses the newest possible weights.

Groups go from the workers straight to the buffer, so only the buffer knows whether it took a group.
This loop knows which groups are being played. `_change_condition` is held while the two must agree.
A refused group is replaced by the task that played it, or by a checkpoint if that comes first.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import BufferLostError
from ludus.proto.runs import PlaySpan
from ludus.trainer.actors.processes import Buffer, Slot, Workers
from ludus.trainer.core.tasks import CancellingTaskGroup
from ludus.trainer.core.types import GroupSpec
from ludus.trainer.data.buffer import GroupAdmission, Refusal
from ludus.trainer.data.mixture import Mixture
from ludus.trainer.run.checkpoint import RunState


class SamplingLoop:
    """A loop that admits groups and has them played until it is cancelled."""

    def __init__(
        self, run: LanguageModelRun, mixture: Mixture, workers: Workers, buffer: Buffer
    ) -> None:
        self._mixture = mixture
        self._workers = workers
        self._buffer = buffer
        self._environments = frozenset(run.environments)
        training, num_groups = run.training, None
        if training.num_epochs is not None:
            num_groups = training.num_steps * training.groups_per_step
        self._admission = GroupAdmission(
            training.groups_per_step, training.max_staleness, num_groups
        )
        self._delivered_version: int | None = None
        self._waiting_groups: deque[GroupSpec] = deque()
        """Groups to start before new groups: resumed groups and replacements."""
        self._playing_groups: dict[int, GroupSpec] = {}
        """Groups being played and not yet replaced, by index."""
        self._change_condition = asyncio.Condition()
        self._plays: list[PlaySpan] = []
        """Calls of workers that ended since the last step."""
        self._idle_s = 0.0
        self._idle_since_s: float | None = time.monotonic()

    async def restore(self, state: RunState) -> None:
        """Take over the pending groups of `state`, when there are no others."""
        num_kept = await self._buffer.restore(state.buffered_groups, state.counts, state.step)
        self._admission.num_admitted = state.step * self._admission.groups_per_step + num_kept
        # A resumed run may have other environments.
        self._waiting_groups.extend(
            spec for spec in state.unfinished_groups if spec.environment in self._environments
        )

    async def run(self, tasks: CancellingTaskGroup) -> None:
        """Admit groups until cancelled; each slot of groups is played as one of `tasks`."""
        self.take_idle_s()
        while True:
            async with self._change_condition:
                await self._change_condition.wait_for(lambda: self._capacity > 0)
            slot = await self._workers.acquire_slot()
            try:
                specs = await self._admit(slot.max_groups)
            except BaseException:
                slot.release()
                raise
            tasks.start(self._play(slot, specs))

    async def set_delivered_version(self, version: int) -> None:
        """Admit groups for `version`, which all workers now sample from."""
        async with self._change_condition:
            self._delivered_version = version
            self._change_condition.notify_all()

    async def copy_state(self, state: RunState) -> RunState:
        """Return a copy of the state with the groups that were started and not yet trained on.

        If the buffer is lost, its groups are missing. Groups being played then get new indices,
        because some of them may have been trained on.
        """
        async with self._change_condition:
            try:
                contents = await self._buffer.copy_state()
            except BufferLostError:
                groups = list(map(self._mixture.reissue_group, self._playing_groups.values()))
                state_copy = state.model_copy(deep=True)
                state_copy.unfinished_groups += [*groups, *self._waiting_groups]
                return state_copy
            groups = [self._playing_groups[index] for index in contents.playing_indices]
            self._replace_refused_groups(contents.refusals)
            self._change_condition.notify_all()
            state_copy = state.model_copy(deep=True)
            state_copy.unfinished_groups = [*groups, *self._waiting_groups]
            state_copy.buffered_groups, state_copy.counts = contents.groups, contents.counts
            return state_copy

    def describe(self) -> str:
        """Describe which groups are being played, and the state of the workers."""
        num_groups = Counter(spec.environment for spec in self._playing_groups.values())
        groups = ", ".join(f"{num_groups[name]} in '{name}'" for name in sorted(num_groups))
        return f"groups being played: {groups or 'none'}; {self._workers.describe()}"

    def take_idle_s(self) -> float:
        """Return the seconds since the last call in which no group was played."""
        now_s = time.monotonic()
        if self._idle_since_s is not None:
            self._idle_s += now_s - self._idle_since_s
            self._idle_since_s = now_s
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    def take_plays(self) -> list[PlaySpan]:
        """Return the calls of workers that ended since the last call of this method."""
        plays, self._plays = self._plays, []
        return plays

    @property
    def _capacity(self) -> int:
        if self._delivered_version is None:
            return 0
        return self._admission.compute_capacity(self._delivered_version)

    async def _admit(self, max_groups: int) -> list[GroupSpec]:
        """Start between one and `max_groups` groups and return them."""
        async with self._change_condition:
            assert self._delivered_version is not None
            specs = [self._take_next_group() for _ in range(min(max_groups, self._capacity))]
            self._admission.admit(len(specs))
            self._playing_groups.update({spec.index: spec for spec in specs})
            self._update_idle_time()
            final_indices = {spec.index for spec in specs if spec.is_final}
            indices = [spec.index for spec in specs]
            await self._buffer.begin(indices, self._delivered_version, final_indices)
        return specs

    async def _play(self, slot: Slot, specs: Sequence[GroupSpec]) -> None:
        start_s = time.time()
        refusals = await slot.play(specs)
        play = PlaySpan(
            worker=slot.worker_number,
            num_groups=len(specs),
            num_refused=len(refusals),
            start_s=start_s,
            end_s=time.time(),
        )
        self._plays.append(play)
        async with self._change_condition:
            self._replace_refused_groups(refusals)
            for spec in specs:
                self._playing_groups.pop(spec.index, None)
            self._update_idle_time()
            self._change_condition.notify_all()

    def _take_next_group(self) -> GroupSpec:
        if self._waiting_groups:
            return self._waiting_groups.popleft()
        return self._mixture.take_next_group()

    def _replace_refused_groups(self, refusals: Sequence[Refusal]) -> None:
        for refusal in sorted(refusals, key=lambda refusal: refusal.index):
            spec = self._playing_groups.pop(refusal.index, None)
            if spec is not None:
                self._admission.release(1)
                replacement = self._mixture.replace_group(spec, is_lost=refusal.is_lost)
                self._waiting_groups.append(replacement)

    def _update_idle_time(self) -> None:
        if self._playing_groups:
            self._idle_s = self.take_idle_s()
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = time.monotonic()
