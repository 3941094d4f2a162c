"""The buffer returns groups in the order of their starts, and refuses useless groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ludus.proto.config import GrpoConfig
from ludus.trainer.core.types import GroupSpec, Rollout, RolloutGroup, TurnSpan, make_lost_group
from ludus.trainer.data.buffer import GroupBuffer, Refusal
from ludus.trainer.data.counts import (
    RolloutCounts,
    VarianceTest,
    choose_variance_test,
    has_equal_rewards,
    sum_counts,
)
from tests.data.rollouts import make_group


def make_buffer(
    *,
    groups_per_step: int = 1,
    max_staleness: int = 1,
    window_fraction: float = 1.0,
    keeps_zero_variance_groups: bool = False,
    has_zero_variance: VarianceTest = has_equal_rewards,
) -> GroupBuffer:
    """Return an empty buffer."""
    return GroupBuffer(
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        window_fraction=window_fraction,
        keeps_zero_variance_groups=keeps_zero_variance_groups,
        has_zero_variance=has_zero_variance,
    )


def make_turns_group(*rewards_by_rollout: Sequence[float]) -> RolloutGroup:
    """Return a group of episodes with these rewards of their turns."""
    group = make_group(*map(sum, rewards_by_rollout))
    rollouts = []
    for rollout, rewards in zip(group.rollouts, rewards_by_rollout, strict=True):
        turns = tuple(TurnSpan(2 + index, 3 + index, value) for index, value in enumerate(rewards))
        sequence = replace(rollout.sequences[0], turns=turns)
        rollouts.append(replace(rollout, sequences=(sequence,)))
    return replace(group, rollouts=tuple(rollouts))


def return_zero_advantages(rollouts: Sequence[Rollout]) -> list[float]:
    """Return an advantage of zero for each episode."""
    return [0.0] * len(rollouts)


def test_batch_contains_the_oldest_groups_sorted_by_index() -> None:
    buffer = make_buffer(groups_per_step=2)
    buffer.begin([4, 2, 9], version=0)
    buffer.put([make_group(1, -1, index=index) for index in (9, 2, 4)])
    assert [group.index for group in buffer.take(0)] == [2, 4]
    assert [group.index for group in buffer.groups] == [9]


def test_incomplete_batch_is_not_returned() -> None:
    buffer = make_buffer(groups_per_step=2)
    buffer.begin([0, 1], version=0)
    buffer.put([make_group(1, -1, index=0)])
    assert buffer.take(0) == []
    assert len(buffer) == 1


def test_group_does_not_overtake_a_group_with_an_earlier_deadline() -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=0)
    buffer.begin([0], version=0)
    buffer.begin([1], version=1)
    buffer.put([make_group(1, -1, index=1, version=1)])
    assert buffer.take(0) == [], "group 1 overtook group 0"


@pytest.mark.parametrize(
    ("algorithm", "rewards_by_rollout", "is_refused"),
    [
        ({"credit": "episode"}, [(1, 0), (0, 1)], True),
        ({"credit": "turn"}, [(1, 0), (0, 1)], False),
        ({"credit": "turn"}, [(1, 0), (1, 0)], True),
        ({"credit": "turn"}, [(0, 1), (1,)], True),
        ({"credit": "turn", "gamma": 0.5}, [(0, 1), (1,)], False),
        ({"advantages": "tests.data.test_buffer:return_zero_advantages"}, [(1, 0), (0, 1)], False),
    ],
)
def test_variance_is_measured_by_the_advantages(
    algorithm: dict[str, Any], rewards_by_rollout: list[tuple[float, ...]], is_refused: bool
) -> None:
    config = GrpoConfig.model_validate(algorithm)
    buffer = make_buffer(has_zero_variance=choose_variance_test(config))
    buffer.begin([0], version=0)
    refusals = buffer.put([make_turns_group(*rewards_by_rollout)])
    assert bool(refusals) is is_refused


@pytest.mark.parametrize("rewards", [(1, 1), (0.1 + 0.2, 0.1 + 0.2), (1, None), (None, None)])
def test_zero_variance_or_void_group_is_refused(
    rewards: tuple[float | None, ...],
) -> None:
    buffer = make_buffer()
    buffer.begin([0], version=0)
    assert [refusal.index for refusal in buffer.put([make_group(*rewards)])] == [0]
    assert len(buffer) == 0
    assert buffer.put([make_group(*rewards)]) == [], "the group was replaced twice"


def test_rewards_with_different_rounding_are_not_equal() -> None:
    buffer = make_buffer()
    buffer.begin([0], version=0)
    assert buffer.put([make_group(0.1 + 0.2, 0.3)]) == []


def test_buffer_can_keep_zero_variance_groups_but_not_void_groups() -> None:
    buffer = make_buffer(keeps_zero_variance_groups=True)
    buffer.begin([0, 1], version=0)
    assert buffer.put([make_group(1, 1, index=0), make_group(1, None, index=1)]) == [
        Refusal(1, is_lost=True)
    ]
    assert [group.index for group in buffer.groups] == [0]


def test_group_with_one_lost_episode_is_kept() -> None:
    buffer = make_buffer()
    buffer.begin([0], version=0)
    assert buffer.put([make_group(1, -1, None)]) == []


def test_lost_group_is_refused() -> None:
    buffer = make_buffer()
    buffer.begin([0, 1], version=0)
    lost_group = make_lost_group(GroupSpec(0, "coins", (1, 1)))
    assert buffer.put([lost_group, make_group(1, -1, index=1)]) == [Refusal(0, is_lost=True)]
    assert buffer.counts["coins"].num_lost == 2


def test_stale_group_is_refused() -> None:
    buffer = make_buffer(max_staleness=1)
    buffer.begin([0], version=5)
    assert buffer.put([make_group(1, -1, version=4)]) == [Refusal(0, is_lost=True)]
    assert buffer.counts["coins"].num_stale_groups == 1


def test_taking_counts_resets_them() -> None:
    buffer = make_buffer()
    buffer.begin([0, 1], version=0)
    buffer.put([make_group(1, -1, None, index=0), make_group(0, 0, index=1)])
    counts = sum_counts(buffer.take_counts().values())
    assert (counts.num_episodes, counts.num_scored, counts.num_lost) == (5, 4, 1)
    assert (counts.num_groups, counts.num_zero_variance_groups, counts.num_void_groups) == (2, 1, 0)
    assert buffer.take_counts() == {}


def test_restore_replaces_the_contents() -> None:
    buffer = make_buffer(groups_per_step=2)
    buffer.begin([0, 1, 2], version=0)
    buffer.put([make_group(1, -1, index=0)])
    restored_groups = [make_group(1, -1, index=7), make_group(1, -1, index=3)]
    assert buffer.restore(restored_groups, {"coins": RolloutCounts(num_groups=4)}, version=0) == 2
    assert [group.index for group in buffer.groups] == [3, 7]
    assert buffer.put([make_group(1, 1, index=1)]) == [], "the rolled-back group was replaced"
    assert buffer.copy_state().refusals == []
    counts = buffer.counts["coins"]
    assert counts.num_rolled_back_groups == 2, "a waiting or a late group was not counted"
    assert counts.num_groups == 6


def test_restore_drops_stale_groups() -> None:
    buffer = make_buffer(groups_per_step=2, max_staleness=0)
    groups = [make_group(1, -1, index=index, version=min(5, 4 + index // 2)) for index in range(6)]
    assert buffer.restore(groups, {}, version=5) == 2
    assert [group.index for group in buffer.take(5)] == [2, 3]
    assert buffer.counts["coins"].num_stale_groups == 4


def test_state_contains_groups_and_each_refusal_once() -> None:
    buffer = make_buffer()
    buffer.begin([0, 1, 2], version=0)
    buffer.put([make_group(1, -1, index=0), make_group(1, 1, index=1)])
    state = buffer.copy_state()
    assert ([group.index for group in state.groups], state.playing_indices) == ([0], [2])
    assert state.refusals == [Refusal(1, is_lost=False)]
    assert buffer.copy_state().refusals == []
