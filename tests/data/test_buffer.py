"""The buffer trains on what teaches, and drops what is too old."""

from __future__ import annotations

import pytest

from ludus.trainer.data.buffer import GroupBuffer, count_group
from tests.data.rollouts import make_group


def make_buffer(*, max_staleness: int = 1, keep_dead_groups: bool = False) -> GroupBuffer:
    """An empty buffer."""
    return GroupBuffer(max_staleness=max_staleness, keep_dead_groups=keep_dead_groups)


def test_groups_leave_in_the_order_they_came() -> None:
    buffer = make_buffer()
    buffer.put([make_group(1, -1, index=index) for index in (4, 2, 9)])
    assert [group.index for group in buffer.take(2)] == [4, 2]
    assert [group.index for group in buffer.groups] == [9]


@pytest.mark.parametrize("rewards", [(1, 1), (0.1 + 0.2, 0.1 + 0.2), (1, None), (None, None)])
def test_a_group_that_teaches_nothing_is_refused_for_replacement(
    rewards: tuple[float | None, ...],
) -> None:
    buffer = make_buffer()
    assert buffer.put([make_group(*rewards)]) == 1
    assert len(buffer) == 0


def test_rewards_that_differ_by_rounding_are_not_equal() -> None:
    assert make_buffer().put([make_group(0.1 + 0.2, 0.3)]) == 0


def test_dead_groups_are_kept_on_request_but_never_void_ones() -> None:
    buffer = make_buffer(keep_dead_groups=True)
    assert buffer.put([make_group(1, 1), make_group(1, None)]) == 1
    assert len(buffer) == 1


def test_a_lost_episode_does_not_spoil_its_group() -> None:
    buffer = make_buffer()
    assert buffer.put([make_group(1, -1, None)]) == 0


@pytest.mark.parametrize(("version", "num_dropped"), [(5, 0), (6, 1), (7, 2)])
def test_no_group_older_than_the_bound_is_left(version: int, num_dropped: int) -> None:
    buffer = make_buffer(max_staleness=1)
    buffer.put([make_group(1, -1, version=4), make_group(1, -1, version=5)])
    assert buffer.drop_stale(version) == num_dropped
    assert all(version - group.policy_version <= 1 for group in buffer.groups)


def test_counts_add_up_and_start_anew_once_taken() -> None:
    buffer = make_buffer()
    buffer.put([make_group(1, -1, None), make_group(0, 0)])
    counts = buffer.take_counts()
    assert (counts.num_episodes, counts.num_lost, counts.num_wins) == (5, 1, 1)
    assert (counts.num_groups, counts.num_dead_groups, counts.num_void_groups) == (2, 1, 0)
    assert buffer.take_counts() == type(counts)()


def test_a_lost_episode_counts_neither_as_win_nor_as_loss() -> None:
    counts = count_group(make_group(1, -1, None))
    assert (counts.reward_sum, counts.num_wins, counts.num_lost) == (0, 1, 1)
