"""The buffer trains on what teaches, in the order in which it began."""

from __future__ import annotations

import pytest

from ludus.trainer.core.types import GroupSpec, make_lost_group
from ludus.trainer.data.buffer import GroupBuffer, Refusal
from ludus.trainer.data.counts import RolloutCounts, total
from tests.data.rollouts import make_group


def make_buffer(
    *,
    groups_per_step: int = 1,
    max_staleness: int = 1,
    window_fraction: float = 1.0,
    keep_zero_variance_groups: bool = False,
) -> GroupBuffer:
    """An empty buffer."""
    return GroupBuffer(
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        window_fraction=window_fraction,
        keep_zero_variance_groups=keep_zero_variance_groups,
    )


def test_a_batch_takes_the_groups_that_began_first_and_has_them_by_index() -> None:
    buffer = make_buffer(groups_per_step=2)
    buffer.begin([4, 2, 9], version=0)
    buffer.put([make_group(1, -1, index=index) for index in (9, 2, 4)])
    assert [group.index for group in buffer.take(0)] == [2, 4]
    assert [group.index for group in buffer.groups] == [9]


def test_a_batch_is_taken_whole_or_not_at_all() -> None:
    buffer = make_buffer(groups_per_step=2)
    buffer.begin([0, 1], version=0)
    buffer.put([make_group(1, -1, index=0)])
    assert buffer.take(0) == []
    assert len(buffer) == 1


def test_no_group_overtakes_one_that_would_be_too_old_afterwards() -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=0)
    buffer.begin([0], version=0)
    buffer.begin([1], version=1)
    buffer.put([make_group(1, -1, index=1, version=1)])
    assert buffer.take(0) == [], "group 0 may be trained on in batch 0 only"


@pytest.mark.parametrize("rewards", [(1, 1), (0.1 + 0.2, 0.1 + 0.2), (1, None), (None, None)])
def test_a_group_that_teaches_nothing_is_refused_for_replacement(
    rewards: tuple[float | None, ...],
) -> None:
    buffer = make_buffer()
    buffer.begin([0], version=0)
    assert [one.index for one in buffer.put([make_group(*rewards)])] == [0]
    assert len(buffer) == 0
    assert buffer.put([make_group(*rewards)]) == [], "it is replaced once"


def test_rewards_that_differ_by_rounding_are_not_equal() -> None:
    buffer = make_buffer()
    buffer.begin([0], version=0)
    assert buffer.put([make_group(0.1 + 0.2, 0.3)]) == []


def test_zero_variance_groups_are_kept_on_request_but_never_void_ones() -> None:
    buffer = make_buffer(keep_zero_variance_groups=True)
    buffer.begin([0, 1], version=0)
    assert buffer.put([make_group(1, 1, index=0), make_group(1, None, index=1)]) == [
        Refusal(1, is_lost=True)
    ]
    assert [group.index for group in buffer.groups] == [0]


def test_a_lost_episode_does_not_spoil_its_group() -> None:
    buffer = make_buffer()
    buffer.begin([0], version=0)
    assert buffer.put([make_group(1, -1, None)]) == []


def test_groups_that_died_with_their_worker_are_to_be_replaced() -> None:
    buffer = make_buffer()
    buffer.begin([0, 1], version=0)
    lost = make_lost_group(GroupSpec(0, "coins", (1, 1)))
    assert buffer.put([lost, make_group(1, -1, index=1)]) == [Refusal(0, is_lost=True)]
    assert buffer.counts["coins"].num_lost == 2


def test_a_group_sampled_by_older_weights_than_it_should_be_is_refused_and_counted() -> None:
    buffer = make_buffer(max_staleness=1)
    buffer.begin([0], version=5)
    assert buffer.put([make_group(1, -1, version=4)]) == [Refusal(0, is_lost=True)]
    assert buffer.counts["coins"].num_stale_groups == 1


def test_counts_add_up_and_start_again_once_taken() -> None:
    buffer = make_buffer()
    buffer.begin([0, 1], version=0)
    buffer.put([make_group(1, -1, None, index=0), make_group(0, 0, index=1)])
    counts = total(buffer.take_counts().values())
    assert (counts.num_episodes, counts.num_scored, counts.num_lost) == (5, 4, 1)
    assert (counts.num_groups, counts.num_zero_variance_groups, counts.num_void_groups) == (2, 1, 0)
    assert buffer.take_counts() == {}


def test_what_is_restored_is_all_there_is_and_late_comers_are_refused_and_counted() -> None:
    buffer = make_buffer(groups_per_step=2)
    buffer.begin([0, 1, 2], version=0)
    buffer.put([make_group(1, -1, index=0)])
    kept = [make_group(1, -1, index=7), make_group(1, -1, index=3)]
    assert buffer.restore(kept, {"coins": RolloutCounts(num_groups=4)}, version=0) == 2
    assert [group.index for group in buffer.groups] == [3, 7]
    assert buffer.put([make_group(1, 1, index=1)]) == [], "nothing takes its place"
    assert buffer.state().refused == []
    counts = buffer.counts["coins"]
    assert counts.num_rolled_back_groups == 2, "one that waited, one that came late"
    assert counts.num_groups == 6


def test_what_a_lower_bound_makes_too_old_is_dropped_when_restored() -> None:
    buffer = make_buffer(groups_per_step=2, max_staleness=0)
    waited = [make_group(1, -1, index=index, version=min(5, 4 + index // 2)) for index in range(6)]
    assert buffer.restore(waited, {}, version=5) == 2
    assert [group.index for group in buffer.take(5)] == [2, 3]
    assert buffer.counts["coins"].num_stale_groups == 4


def test_all_that_is_held_is_told_at_once() -> None:
    buffer = make_buffer()
    buffer.begin([0, 1, 2], version=0)
    buffer.put([make_group(1, -1, index=0), make_group(1, 1, index=1)])
    state = buffer.state()
    assert ([group.index for group in state.groups], state.played) == ([0], [2])
    assert state.refused == [Refusal(1, is_lost=False)]
    assert buffer.state().refused == []
