"""Groups on their way to training: a window over the order in which they began.

    begin           put                       take
      |              |                          |
      v              v                          v
    played ----> finished, waits ----> B groups, oldest first, for batch t
                     |
                     +-- zero-variance, void, stale: must be replaced

Oldest first alone would let one long game hold up everything behind it. So younger groups may
be trained on before it, within two limits:

  window    a group that began W or more places after one that is still played must wait for
            it. W = max(1, floor(window_fraction * (S + 1) * B)), so at most W - 1 groups ever
            overtake one. (The windowed first-in-first-out queue of MiniMax and TitanRL.)
  deadline  every group that is left behind must still be in time if, from the next batch on,
            training took strictly the oldest first.

Why no sample is older than S. A group that begins under version v has the deadline v + S: the
last batch in which it is not too old. Let the groups that are played or wait stand in the order
in which they began, numbered i = 0, 1, ... The invariant, before batch t is taken:

    t + floor(i / B) <= deadline of group i                                              (*)

- A group begins: admission allows (v + S + 1) * B groups in all, t * B of which are trained
  on, so i < (v + S + 1 - t) * B, and (*) holds for the new one. The others keep their numbers.
- A group is refused: those behind it move up, and (*) is looser for them.
- Batch t is taken: the second limit is (*) for t + 1.

By (*) every group in batch t has a deadline of t or later. And nothing ever waits for ever:
once the oldest B groups have finished, taking them moves the others up by B places, which
keeps (*), and no older group is in the way. So no group is dropped for its age, with S = 0 too,
where B groups are all there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludus.proto.runs import Transcript
from ludus.trainer.core.types import RolloutGroup
from ludus.trainer.data.counts import RolloutCounts, count_group


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """What the driver must know of a group that is trained on."""

    index: int
    environment: str
    staleness: int
    """Versions between the weights that played it and those that it trains."""
    num_scored: int
    """Episodes that have a reward."""
    transcripts: tuple[Transcript, ...] = ()
    """Of some of its episodes."""


def summarize(group: RolloutGroup, version: int) -> GroupSummary:
    """The summary of a group of batch `version`."""
    num_scored = sum(reward is not None for reward in group.rewards)
    staleness = version - group.policy_version
    return GroupSummary(group.index, group.environment, staleness, num_scored, group.transcripts)


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A batch, or none yet, and what the buffer saw since the last one."""

    groups: tuple[GroupSummary, ...]
    """training.groups_per_step of them, by index, or none."""
    counts: dict[str, RolloutCounts]
    """Since the last batch, by environment; they start again when groups are taken."""
    depth: int
    """Groups that still wait."""
    batch: Any = None
    """The Batch, or a reference to where it lies; None without groups."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A group in whose place another must be played."""

    index: int
    is_lost: bool
    """Through no fault of its task: infrastructure failed, or its worker held older weights."""


@dataclass(frozen=True, slots=True)
class BufferState:
    """All that the buffer holds, at one moment."""

    groups: list[RolloutGroup]
    """That wait, in the order in which they began."""
    played: list[int]
    """That have begun, and neither wait nor were refused."""
    refused: list[Refusal]
    """That were refused since the last state; whoever put them was told, or is about to be."""
    counts: dict[str, RolloutCounts]
    """Since the last batch, by environment."""


@dataclass(slots=True)
class _Active:
    """A group that has begun and was not trained on yet."""

    position: int
    """In the order in which groups began."""
    deadline: int
    """The last batch in which it is not too old."""
    group: RolloutGroup | None = None
    """None while it is played."""


class GroupBuffer:
    """The groups between their beginning and their training."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        window_fraction: float,
        keep_zero_variance_groups: bool,
    ) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        most = (max_staleness + 1) * groups_per_step
        self._window = max(1, math.floor(window_fraction * most))
        self._keep_zero_variance_groups = keep_zero_variance_groups
        self._active: dict[int, _Active] = {}
        """By index, in the order in which they began."""
        self._refused: dict[int, Refusal] = {}
        """By index, since `state` was called."""
        self._num_begun = 0
        self._counts: dict[str, RolloutCounts] = {}

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def groups(self) -> list[RolloutGroup]:
        """The waiting groups, in the order in which they began."""
        return [a.group for a in self._active.values() if a.group is not None]

    @property
    def counts(self) -> dict[str, RolloutCounts]:
        """What was counted since `take_counts`, by environment."""
        return self._counts

    def begin(self, indices: Iterable[int], version: int) -> None:
        """Expect these groups: they are played from now on, by weights `version` or newer."""
        for index in indices:
            self._add(index, version + self._max_staleness)

    def put(self, groups: Sequence[RolloutGroup]) -> list[Refusal]:
        """The groups that are refused: others must be played in their place.

        Groups that began before `restore` are counted, and nothing takes their place.
        """
        refused = []
        for group in groups:
            active = self._active.get(group.index)
            counts = self._judge(group, active)
            self._count(group.environment, counts)
            if active is None:
                continue
            if self._teaches_nothing(counts):
                del self._active[group.index]
                refused.append(Refusal(group.index, _is_lost(counts)))
            else:
                active.group = group
        self._refused.update({one.index: one for one in refused})
        return refused

    def take(self, version: int) -> list[RolloutGroup]:
        """The groups of batch `version`, by index; none while they cannot be taken yet."""
        chosen = self._oldest_in_window()
        if len(chosen) < self._groups_per_step or not self._others_in_time(chosen, version + 1):
            return []
        taken = [self._active.pop(index).group for index in chosen]
        return sorted((g for g in taken if g is not None), key=lambda group: group.index)

    def take_counts(self) -> dict[str, RolloutCounts]:
        """What was counted since the last call, by environment."""
        counts, self._counts = self._counts, {}
        return counts

    def state(self) -> BufferState:
        """All that is held."""
        played = [index for index, active in self._active.items() if active.group is None]
        refused = [self._refused[index] for index in sorted(self._refused)]
        self._refused.clear()
        return BufferState(self.groups, played, refused, dict(self._counts))

    def restore(
        self, groups: Iterable[RolloutGroup], counts: Mapping[str, RolloutCounts], version: int
    ) -> int:
        """The number of `groups` that are held now, instead of all that was held before.

        The others would be too old, since the staleness bound was lowered. Counts of what was
        held before stay beside `counts`.
        """
        for group in self.groups:
            self._count(group.environment, RolloutCounts(num_rolled_back_groups=1))
        self._active.clear()
        self._refused.clear()
        for environment, more in counts.items():
            self._count(environment, more)
        for group in sorted(groups, key=lambda group: (group.policy_version, group.index)):
            deadline = group.policy_version + self._max_staleness
            if version + len(self._active) // self._groups_per_step <= deadline:
                self._add(group.index, deadline, group)
            else:
                self._count(group.environment, RolloutCounts(num_stale_groups=1))
        return len(self._active)

    def _add(self, index: int, deadline: int, group: RolloutGroup | None = None) -> None:
        assert index not in self._active, f"group {index} has begun before"
        self._active[index] = _Active(self._num_begun, deadline, group)
        self._num_begun += 1

    def _judge(self, group: RolloutGroup, active: _Active | None) -> RolloutCounts:
        counts = count_group(group)
        if active is None:
            return replace(counts, num_rolled_back_groups=1)
        if not counts.num_void_groups:
            # The worker held older weights than it was said to hold.
            stale = group.policy_version + self._max_staleness < active.deadline
            return replace(counts, num_stale_groups=int(stale))
        return counts

    def _teaches_nothing(self, counts: RolloutCounts) -> bool:
        zero_variance = counts.num_zero_variance_groups and not self._keep_zero_variance_groups
        return bool(zero_variance or counts.num_void_groups or counts.num_stale_groups)

    def _oldest_in_window(self) -> list[int]:
        """At most B finished groups; none from beyond the window of the oldest still played."""
        end: float = math.inf
        chosen: list[int] = []
        for index, active in self._active.items():
            if active.position >= end or len(chosen) == self._groups_per_step:
                break
            if active.group is not None:
                chosen.append(index)
            elif end == math.inf:
                end = active.position + self._window
        return chosen

    def _others_in_time(self, chosen: Sequence[int], next_batch: int) -> bool:
        """Whether all but the chosen meet their deadlines, trained on oldest first."""
        taken = set(chosen)
        left = [active for index, active in self._active.items() if index not in taken]
        return all(
            next_batch + number // self._groups_per_step <= active.deadline
            for number, active in enumerate(left)
        )

    def _count(self, environment: str, counts: RolloutCounts) -> None:
        self._counts[environment] = self._counts.get(environment, RolloutCounts()) + counts


def _is_lost(counts: RolloutCounts) -> bool:
    return bool(counts.num_stale_groups or (counts.num_void_groups and counts.num_lost))
