from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ludus.trainer.algorithms.advantages import group_advantages, turn_advantages

NAN = torch.nan
REWARD = st.floats(-5, 5, allow_nan=False, width=32)
BASELINES = st.sampled_from(["mean", "leave_one_out", "none"])


@st.composite
def draw_turn_rewards(draw: st.DrawFn) -> Tensor:
    """Draw rewards [num_groups, G, K] of episodes with different numbers of turns."""
    num_groups, size, max_length = (draw(st.integers(1, max_value)) for max_value in (3, 5, 4))
    rewards = torch.full((num_groups, size, max_length), NAN, dtype=torch.float64)
    for episode in rewards.view(-1, max_length):
        length = draw(st.integers(0, max_length))
        episode[:length] = torch.tensor(
            draw(st.lists(REWARD, min_size=length, max_size=length)), dtype=torch.float64
        )
    return rewards


def test_turn_advantage_compares_returns_from_the_same_turn() -> None:
    rewards = torch.tensor([[[1.0, 2.0, 4.0], [0.0, 8.0, NAN], [3.0, NAN, NAN]]])
    advantages = turn_advantages(rewards)
    # Returns: 7 6 4, 8 8, 3. Means: 6, 7. Only one episode has a third turn.
    assert advantages.tolist() == [[[1, -1, 0], [2, 1, 0], [-3, 0, 0]]]


def test_rewards_are_discounted_per_turn() -> None:
    rewards = torch.tensor([[[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]]])
    advantages = turn_advantages(rewards, gamma=0.5)
    assert advantages[0, 0].tolist() == [(1 + 1 + 1) / 2, (2 + 2) / 2, 4 / 2]


def test_scale_uses_the_returns_at_the_same_turn() -> None:
    rewards = torch.tensor([[[0.0, 10.0], [0.0, 0.0], [5.0, 0.0]]], dtype=torch.float64)
    advantages = turn_advantages(rewards, scale="group")
    for turn, returns in enumerate(([10.0, 0.0, 5.0], [10.0, 0.0, 0.0])):
        expected = group_advantages(torch.tensor([returns]).double(), scale="group")
        torch.testing.assert_close(advantages[..., turn], expected)


@pytest.mark.slow
@given(draw_turn_rewards(), BASELINES)
def test_single_turn_advantages_equal_group_advantages(rewards: Tensor, baseline: str) -> None:
    column = rewards[..., :1]
    torch.testing.assert_close(
        turn_advantages(column, baseline)[..., 0], group_advantages(column[..., 0], baseline)
    )


@pytest.mark.slow
@given(draw_turn_rewards(), st.sampled_from(["mean", "leave_one_out"]), st.floats(0.1, 1))
def test_group_advantages_sum_to_zero_at_every_turn(
    rewards: Tensor, baseline: str, gamma: float
) -> None:
    advantages = turn_advantages(rewards, baseline, gamma=gamma)
    assert advantages.isfinite().all()
    assert (advantages[rewards.isnan()] == 0).all()
    sums = advantages.sum(1)
    torch.testing.assert_close(sums, torch.zeros_like(sums), atol=1e-9, rtol=0)


@pytest.mark.slow
@given(draw_turn_rewards(), BASELINES, st.randoms())
def test_permuting_a_group_permutes_the_turn_advantages(
    rewards: Tensor, baseline: str, random: Random
) -> None:
    order = list(range(rewards.shape[1]))
    random.shuffle(order)
    torch.testing.assert_close(
        turn_advantages(rewards[:, order], baseline), turn_advantages(rewards, baseline)[:, order]
    )


def test_turn_reached_by_a_single_episode_has_zero_advantage() -> None:
    # Each turn costs 1. Against the mean of the first turn, the last turns would look good.
    rewards = torch.tensor([[[-1.0, -1.0, -1.0, -1.0], [-1.0, NAN, NAN, NAN]]])
    assert turn_advantages(rewards).tolist() == [[[-1.5, 0, 0, 0], [1.5, 0, 0, 0]]]
