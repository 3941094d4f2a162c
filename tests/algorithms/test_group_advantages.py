from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ludus.trainer.algorithms.advantages import (
    group_advantages,
    is_zero_variance_group,
)

BASELINES = st.sampled_from(["mean", "leave_one_out"])
SCALES = st.sampled_from(["none", "group", "batch"])
REWARD = st.floats(-10, 10, allow_nan=False, width=32) | st.just(torch.nan)


@st.composite
def draw_reward_groups(draw: st.DrawFn) -> Tensor:
    size = draw(st.integers(1, 6))
    groups = st.lists(st.lists(REWARD, min_size=size, max_size=size), min_size=1, max_size=4)
    return torch.tensor(draw(groups), dtype=torch.float64)


@pytest.mark.slow
@given(draw_reward_groups(), BASELINES, SCALES)
def test_advantages_of_every_group_sum_to_zero(rewards: Tensor, baseline: str, scale: str) -> None:
    advantages = group_advantages(rewards, baseline, scale)
    assert advantages.isfinite().all()
    torch.testing.assert_close(advantages.sum(-1), torch.zeros(len(rewards)).double())


@pytest.mark.slow
@given(draw_reward_groups(), BASELINES, SCALES, st.randoms())
def test_permuting_a_group_permutes_the_advantages(
    rewards: Tensor, baseline: str, scale: str, random: Random
) -> None:
    permutation = list(range(rewards.shape[1]))
    random.shuffle(permutation)
    torch.testing.assert_close(
        group_advantages(rewards[:, permutation], baseline, scale),
        group_advantages(rewards, baseline, scale)[:, permutation],
    )


@pytest.mark.slow
@given(draw_reward_groups(), BASELINES, st.sampled_from(["none", "group"]))
def test_groups_are_independent(rewards: Tensor, baseline: str, scale: str) -> None:
    advantages = [group_advantages(group[None], baseline, scale) for group in rewards]
    torch.testing.assert_close(group_advantages(rewards, baseline, scale), torch.cat(advantages))


@pytest.mark.slow
@given(draw_reward_groups(), BASELINES, SCALES)
def test_unscored_episodes_do_not_affect_advantages(
    rewards: Tensor, baseline: str, scale: str
) -> None:
    unscored_rewards = torch.full((len(rewards), 2), torch.nan, dtype=torch.float64)
    advantages = group_advantages(torch.cat([unscored_rewards, rewards], dim=1), baseline, scale)
    assert (advantages[:, :2] == 0).all()
    torch.testing.assert_close(advantages[:, 2:], group_advantages(rewards, baseline, scale))


def test_unscored_episode_is_not_treated_as_zero_reward() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0, torch.nan]]))
    assert advantages.tolist() == [[0.5, -0.5, 0.0]]


def test_single_scored_episode_has_zero_advantage() -> None:
    rewards = torch.tensor([[3.0, torch.nan], [torch.nan, torch.nan]])
    for baseline in ("mean", "leave_one_out"):
        for scale in ("none", "group", "batch"):
            assert group_advantages(rewards, baseline, scale).tolist() == [[0, 0], [0, 0]]


def test_leave_one_out_subtracts_mean_of_other_scored_episodes() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.5, torch.nan]])
    advantages = group_advantages(rewards, "leave_one_out")
    expected = [1 - 0.5 / 3, 0 - 1.5 / 3, 0 - 1.5 / 3, 0.5 - 1 / 3, 0]
    torch.testing.assert_close(advantages, torch.tensor([expected]))


def test_batch_scale_divides_by_the_std_of_all_rewards() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    std = torch.tensor([0.0, 1.0, 0.0, 3.0]).std()
    expected = torch.tensor([[-0.5, 0.5], [-1.5, 1.5]]) / (std + 1e-4)
    torch.testing.assert_close(group_advantages(rewards, scale="batch"), expected)


def test_equal_rewards_with_a_rounding_error_have_zero_variance() -> None:
    rewards = torch.full((1, 10), 0.1)
    deviations = rewards - rewards.mean()
    assert deviations.any(), (
        "the mean of ten 0.1s has no rounding error on this machine; choose other rewards"
    )
    assert is_zero_variance_group(rewards).tolist() == [True]
    assert not group_advantages(rewards, "mean", "group").any()


def test_smallest_float_difference_is_not_zero_variance() -> None:
    reward = torch.tensor(1.0)
    rewards = torch.stack([reward, reward, torch.nextafter(reward, torch.tensor(2.0))])
    assert is_zero_variance_group(rewards[None]).tolist() == [False]


def test_group_with_fewer_than_two_scored_rewards_has_zero_variance() -> None:
    nan = torch.nan
    rewards = torch.tensor([[1, nan, nan], [nan, nan, nan], [1, nan, 1], [1, nan, 0]])
    assert is_zero_variance_group(rewards).tolist() == [True, True, True, False]


def test_advantage_without_a_baseline_equals_the_reward() -> None:
    rewards = torch.tensor([[1.0, 0.0, torch.nan], [2.0, 2.0, 2.0]])
    assert group_advantages(rewards, "none").tolist() == [[1, 0, 0], [2, 2, 2]]


def test_group_standard_deviation_includes_every_scored_episode() -> None:
    # If mean and deviation excluded the first episode, the advantage would be 2.887.
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.5]])
    assert abs(group_advantages(rewards, "mean", "group")[0, 0] - 1.3053097) < 1e-6
    assert abs(group_advantages(rewards, "leave_one_out", "none")[0, 0] - 0.8333333) < 1e-6
