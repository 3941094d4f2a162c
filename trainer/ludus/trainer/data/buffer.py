"""Admission of groups to rollout, and the buffer of finished groups that wait for training.

Admission limits how far sampling may run ahead of training. With B groups in a batch and the
staleness bound S, group number n (from 0) may start under version v only if n < (v + S + 1) * B.
It then enters the batch of step v + S at the latest. S = 0 is exactly on-policy. (This is the
capacity rule of AReaL, arXiv 2505.24298, counted in groups.) v is the oldest version that any
rollout worker may sample from, so a group that starts now is sampled by version v or newer on
every worker, even while a newer version is being delivered.

The buffer has a window over the starting order of the groups:

    begin           put                       take
      |              |                          |
      v              v                          v
    played ----> finished, waits ----> B groups, oldest first, for batch t
                     |
                     +-- zero-variance, void, stale: refused, must be replaced

The replacements of a step are bounded (`data/mixture.py`): a final group with zero variance is not
refused.

Strictly oldest first would let one long episode block everything that started after it. So
younger groups may be trained on earlier, within two limits:

  window    If a group is still being played, groups that started W or more positions later must
            wait for it. W = max(1, floor(window_fraction * (S + 1) * B)), so at most W - 1 groups
            ever overtake one. (The windowed first-in-first-out queue of MiniMax and TitanRL.)
  deadline  Each group that is not taken must still meet its deadline if all later batches take
            the oldest groups first.

Proof that no sample is older than S. A group that starts under version v has the deadline v + S,
the last batch in which it is not too old. Number the groups that are played or wait i = 0, 1, ...
in their starting order. The invariant, before batch t is taken:

    t + floor(i / B) <= deadline of group i                                              (*)

- A group starts: admission allows (v + S + 1) * B groups in total, t * B of which are trained
  on, so i < (v + S + 1 - t) * B, and (*) holds for the new group. The other numbers do not change.
- A group is refused: the groups after it get smaller numbers, so (*) still holds for them.
- Batch t is taken: the second limit is (*) for t + 1.

By (*), every group in batch t has a deadline of t or later. And nothing waits forever: once the
oldest B groups have finished, taking them moves the others up by B positions, which keeps (*), and
no older group blocks them. So no group is dropped for its age, even if S = 0, where there are
only B groups.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ludus.proto.runs import Transcript
from ludus.trainer.core.types import Batch, RolloutGroup
from ludus.trainer.data.counts import (
    RolloutCounts,
    VarianceTest,
    count_group,
    has_equal_rewards,
)

BatchHandle: TypeAlias = Batch | Awaitable[Batch]
"""A batch, or a reference to it. The driver only passes it from the buffer to the learner."""


@dataclass(slots=True)
class GroupAdmission:
    """A counter of the groups that have started and will be trained on.

    A group that will not be trained on releases its admission, and another group replaces it.
    """

    groups_per_step: int
    max_staleness: int
    num_groups: int | None = None
    """Maximum number of groups of a run over whole passes of a data set, in which an extra group
    would use up a row without training on it; None if there is no limit."""
    num_admitted: int = 0
    """Number of groups that were trained on, wait in the buffer, or are being played."""

    def compute_capacity(self, version: int) -> int:
        """Return the number of groups that may start now, at policy version `version`."""
        max_groups = (version + self.max_staleness + 1) * self.groups_per_step
        if self.num_groups is not None:
            max_groups = min(max_groups, self.num_groups)
        return max(0, max_groups - self.num_admitted)

    def admit(self, num_groups: int) -> None:
        """Count groups that start."""
        self.num_admitted += num_groups

    def release(self, num_groups: int) -> None:
        """Stop counting groups that will not be trained on."""
        self.num_admitted -= num_groups


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Facts about a group of a batch that the driver needs."""

    index: int
    environment: str
    staleness: int
    """Version of the weights that the group trains, minus the version that sampled the group."""
    num_scored: int
    """Number of episodes with a reward."""
    has_variance: bool = True
    """False if all advantages of the group are zero."""
    transcripts: tuple[Transcript, ...] = ()
    """Transcripts of some episodes."""


def summarize(
    group: RolloutGroup, version: int, has_zero_variance: VarianceTest = has_equal_rewards
) -> GroupSummary:
    """Return the summary of a group of batch `version`."""
    return GroupSummary(
        index=group.index,
        environment=group.environment,
        staleness=version - group.policy_version,
        num_scored=sum(reward is not None for reward in group.rewards),
        has_variance=not has_zero_variance(group),
        transcripts=group.transcripts,
    )


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A batch, if it is complete, and counts since the last batch."""

    groups: tuple[GroupSummary, ...]
    """The training.groups_per_step groups of the batch, by index; empty if it is not complete."""
    counts: dict[str, RolloutCounts]
    """Counts since the last batch, by environment."""
    num_waiting_groups: int
    """Number of finished groups that remain in the buffer."""
    batch: BatchHandle | None = None
    """The batch; None without groups."""

    @property
    def has_variance(self) -> bool:
        """True if a group of the batch has variance."""
        return any(group.has_variance for group in self.groups)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A group that was refused and must be replaced."""

    index: int
    is_lost: bool
    """True if the infrastructure failed, or the weights were too old; then the task is kept."""


@dataclass(frozen=True, slots=True)
class BufferState:
    """A copy of the buffer's contents."""

    groups: list[RolloutGroup]
    """Waiting groups, in their starting order."""
    playing_indices: list[int]
    """Indices of the groups that are still being played."""
    refusals: list[Refusal]
    """Refusals since the previous call; the caller of `put` may not have received them yet."""
    counts: dict[str, RolloutCounts]
    """Counts since the last batch, by environment."""


@dataclass(slots=True)
class _Slot:
    """The slot of a group that has started and was not trained on yet."""

    position: int
    """Position in the starting order."""
    deadline: int
    """The last batch in which the group is not too old."""
    group: RolloutGroup | None = None
    """The finished group; None while it is being played."""
    is_final: bool = False
    """True if the group is kept even if it has zero variance."""


class GroupBuffer:
    """A buffer of the groups that are being played or wait for training."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        window_fraction: float,
        keeps_zero_variance_groups: bool,
        has_zero_variance: VarianceTest = has_equal_rewards,
    ) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        max_groups = (max_staleness + 1) * groups_per_step
        self._window = max(1, math.floor(window_fraction * max_groups))
        self._keeps_zero_variance_groups = keeps_zero_variance_groups
        self._has_zero_variance = has_zero_variance
        self._slots: dict[int, _Slot] = {}
        """Slots by the index of their group, in starting order."""
        self._taken_slots: dict[int, _Slot] = {}
        """Slots of the latest batch, for `put_back`."""
        self._refusals: dict[int, Refusal] = {}
        """Refusals by index, since the last call of `copy_state`."""
        self._num_started = 0
        self.counts: dict[str, RolloutCounts] = {}
        """Counts since the last call of `take_counts`, by environment."""

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def groups(self) -> list[RolloutGroup]:
        """The waiting groups, in their starting order."""
        return [slot.group for slot in self._slots.values() if slot.group is not None]

    def begin(
        self, indices: Iterable[int], version: int, final_indices: Container[int] = ()
    ) -> None:
        """Record the start of groups, with weights of `version` or newer.

        `final_indices` are the groups that are kept even if they have zero variance.
        """
        for index in indices:
            self._add_group(index, version + self._max_staleness)
            self._slots[index].is_final = index in final_indices

    def put(self, groups: Sequence[RolloutGroup]) -> list[Refusal]:
        """Add finished groups; return the refused groups, which must be replaced.

        Groups that started before `restore` are counted, but not replaced.
        """
        refusals = []
        for group in groups:
            slot = self._slots.get(group.index)
            counts = self._count_finished(group, slot)
            if slot is None:
                self._add_counts(group.environment, counts)
                continue
            is_refused = bool(counts.num_void_groups or counts.num_stale_groups)
            if not is_refused and not self._keeps_zero_variance_groups:
                is_refused = bool(counts.num_zero_variance_groups) and not slot.is_final
                counts = _count_replacement(counts, is_replaced=is_refused)
            self._add_counts(group.environment, counts)
            if is_refused:
                del self._slots[group.index]
                refusals.append(Refusal(group.index, _is_lost(counts)))
            else:
                slot.group = group
        self._refusals.update({refusal.index: refusal for refusal in refusals})
        return refusals

    def take(self, version: int) -> list[RolloutGroup]:
        """Return the groups of batch `version`, by index; none if it is not complete yet."""
        indices = self._find_oldest_in_window()
        is_full = len(indices) == self._groups_per_step
        if not is_full or not self._can_postpone_others(set(indices), version + 1):
            return []
        self._taken_slots = {index: self._slots.pop(index) for index in sorted(indices)}
        return [slot.group for slot in self._taken_slots.values() if slot.group is not None]

    def put_back(self, counts: Mapping[str, RolloutCounts]) -> None:
        """Undo the latest `take`, whose batch was not trained on, and add its `counts` again."""
        slots = {**self._taken_slots, **self._slots}
        self._slots = dict(sorted(slots.items(), key=lambda item: item[1].position))
        self._taken_slots = {}
        for environment, environment_counts in counts.items():
            self._add_counts(environment, environment_counts)

    def take_counts(self) -> dict[str, RolloutCounts]:
        """Return the counts since the last call, by environment, and reset them."""
        counts, self.counts = self.counts, {}
        return counts

    def copy_state(self) -> BufferState:
        """Return a copy of the contents, and clear the refusals."""
        playing_indices = [index for index, slot in self._slots.items() if slot.group is None]
        refusals = [self._refusals[index] for index in sorted(self._refusals)]
        self._refusals.clear()
        return BufferState(self.groups, playing_indices, refusals, dict(self.counts))

    def restore(
        self, groups: Iterable[RolloutGroup], counts: Mapping[str, RolloutCounts], version: int
    ) -> int:
        """Replace the contents by `groups` and add `counts`; return the number of groups kept.

        Groups that are too old, because the staleness bound was lowered, are dropped. The current
        counts are kept.
        """
        for group in self.groups:
            self._add_counts(group.environment, RolloutCounts(num_rolled_back_groups=1))
        self._slots.clear()
        self._taken_slots.clear()
        self._refusals.clear()
        for environment, environment_counts in counts.items():
            self._add_counts(environment, environment_counts)
        for group in sorted(groups, key=lambda group: (group.policy_version, group.index)):
            deadline = group.policy_version + self._max_staleness
            if version + len(self._slots) // self._groups_per_step <= deadline:
                self._add_group(group.index, deadline, group)
            else:
                self._add_counts(group.environment, RolloutCounts(num_stale_groups=1))
        return len(self._slots)

    def _add_group(self, index: int, deadline: int, group: RolloutGroup | None = None) -> None:
        assert index not in self._slots, f"group {index} has already started"
        self._slots[index] = _Slot(self._num_started, deadline, group)
        self._num_started += 1

    def _count_finished(self, group: RolloutGroup, slot: _Slot | None) -> RolloutCounts:
        counts = count_group(group, self._has_zero_variance)
        if slot is None:
            return replace(counts, num_rolled_back_groups=1)
        if not counts.num_void_groups:
            # A group is stale only if its worker had older weights than the driver assumed.
            is_stale = group.policy_version + self._max_staleness < slot.deadline
            return replace(counts, num_stale_groups=int(is_stale))
        return counts

    def _find_oldest_in_window(self) -> list[int]:
        """Return the indices of at most B finished groups in the window, oldest first."""
        window_end: float = math.inf
        indices: list[int] = []
        for index, slot in self._slots.items():
            if slot.position >= window_end or len(indices) == self._groups_per_step:
                break
            if slot.group is not None:
                indices.append(index)
            elif window_end == math.inf:
                window_end = slot.position + self._window
        return indices

    def _can_postpone_others(self, taken_indices: set[int], next_batch: int) -> bool:
        """Return whether all other groups meet their deadlines if they are taken oldest first."""
        slots = [slot for index, slot in self._slots.items() if index not in taken_indices]
        return all(
            next_batch + order // self._groups_per_step <= slot.deadline
            for order, slot in enumerate(slots)
        )

    def _add_counts(self, environment: str, counts: RolloutCounts) -> None:
        self.counts[environment] = self.counts.get(environment, RolloutCounts()) + counts


def _count_replacement(counts: RolloutCounts, *, is_replaced: bool) -> RolloutCounts:
    """Count a zero-variance group as replaced or as kept."""
    if is_replaced:
        return replace(counts, num_replaced_groups=counts.num_zero_variance_groups)
    return replace(counts, num_kept_groups=counts.num_zero_variance_groups)


def _is_lost(counts: RolloutCounts) -> bool:
    return bool(counts.num_stale_groups or (counts.num_void_groups and counts.num_lost))
