"""Groups that wait to be trained on, first in, first out.

Admission keeps the groups fresh; the buffer drops the rare straggler that is too old all the
same, so that no sample beyond the bound is ever trained on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ludus.trainer.types import RolloutGroup, RolloutStatus


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """What happened to episodes and groups since the last count."""

    num_episodes: int = 0
    num_lost: int = 0
    num_invalid: int = 0
    num_truncated: int = 0
    num_groups: int = 0
    num_dead_groups: int = 0
    num_void_groups: int = 0
    """Groups in which fewer than two episodes could be scored."""
    num_stale_groups: int = 0
    num_tokens_generated: int = 0
    num_turns: int = 0
    num_wins: int = 0
    reward_sum: float = 0.0
    reward_square_sum: float = 0.0

    def __add__(self, other: RolloutCounts) -> RolloutCounts:
        names = self.__slots__
        return RolloutCounts(**{n: getattr(self, n) + getattr(other, n) for n in names})


def count_group(group: RolloutGroup) -> RolloutCounts:
    """The counts of one finished group."""
    scored = [reward for reward in group.rewards if reward is not None]
    statuses = [rollout.status for rollout in group.rollouts]
    return RolloutCounts(
        num_episodes=len(statuses),
        num_lost=statuses.count(RolloutStatus.LOST),
        num_invalid=statuses.count(RolloutStatus.INVALID_ACTION),
        num_truncated=statuses.count(RolloutStatus.TRUNCATED),
        num_groups=1,
        num_dead_groups=int(len(scored) >= 2 and group.is_dead),
        num_void_groups=int(len(scored) < 2),
        num_tokens_generated=sum(rollout.num_tokens_sampled for rollout in group.rollouts),
        num_turns=sum(len(rollout.turns) for rollout in group.rollouts),
        num_wins=sum((rollout.episode_return or 0) > 0 for rollout in group.rollouts),
        reward_sum=sum(scored),
        reward_square_sum=sum(reward * reward for reward in scored),
    )


class GroupBuffer:
    """The groups between rollout and training."""

    def __init__(self, *, max_staleness: int, keep_dead_groups: bool) -> None:
        self._max_staleness = max_staleness
        self._keep_dead_groups = keep_dead_groups
        self._groups: deque[RolloutGroup] = deque()
        self._counts = RolloutCounts()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> tuple[RolloutGroup, ...]:
        """The waiting groups, oldest first."""
        return tuple(self._groups)

    @property
    def counts(self) -> RolloutCounts:
        """What was counted since `take_counts`."""
        return self._counts

    def put(self, groups: Sequence[RolloutGroup]) -> int:
        """The number of groups that were not taken in and must be replaced."""
        num_refused = 0
        for group in groups:
            counts = count_group(group)
            self._counts += counts
            dead = counts.num_dead_groups and not self._keep_dead_groups
            if dead or counts.num_void_groups:
                num_refused += 1
            else:
                self._groups.append(group)
        return num_refused

    def drop_stale(self, version: int) -> int:
        """The number of groups dropped for being more than S versions older than `version`."""
        oldest = version - self._max_staleness
        fresh = deque(group for group in self._groups if group.policy_version >= oldest)
        num_dropped = len(self._groups) - len(fresh)
        self._groups = fresh
        self._counts = replace(
            self._counts, num_stale_groups=self._counts.num_stale_groups + num_dropped
        )
        return num_dropped

    def take(self, num_groups: int) -> list[RolloutGroup]:
        """The oldest `num_groups` groups; they must be there."""
        return [self._groups.popleft() for _ in range(num_groups)]

    def take_counts(self) -> RolloutCounts:
        """What was counted since the last call."""
        counts, self._counts = self._counts, RolloutCounts()
        return counts
