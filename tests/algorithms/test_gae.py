from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ludus.trainer.algorithms.advantages import gae, returns

NUMBER = st.floats(-5, 5, width=32)
DISCOUNT = st.floats(0, 1, width=32)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and mask [1, T]; rewards lie on actions only."""
    length = draw(st.integers(1, 8))
    row = st.lists(NUMBER, min_size=length, max_size=length)
    mask = torch.tensor([draw(st.lists(st.booleans(), min_size=length, max_size=length))])
    rewards, values = (torch.tensor([draw(row)], dtype=torch.float64) for _ in range(2))
    return torch.where(mask, rewards, 0.0), values, mask


def run_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    bootstrap: float | None = None,
    gamma: float = 0.9,
    lam: float = 0.8,
) -> Tensor:
    terminated = torch.tensor([bootstrap is None])
    bootstrap_value = torch.tensor([bootstrap or 0.0], dtype=rewards.dtype)
    return gae(rewards, values, mask, terminated, bootstrap_value, gamma, lam)


@given(episodes(), DISCOUNT, DISCOUNT, NUMBER | st.none())
def test_gae_equals_its_defining_sum_over_the_actions(
    episode: tuple[Tensor, Tensor, Tensor], gamma: float, lam: float, bootstrap: float | None
) -> None:
    rewards, values, mask = episode
    advantages = run_gae(rewards, values, mask, bootstrap=bootstrap, gamma=gamma, lam=lam)
    r, v = rewards[mask].tolist(), [*values[mask].tolist(), bootstrap or 0.0]
    deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
    expected = [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(r))) for t in range(len(r))
    ]
    torch.testing.assert_close(advantages[mask], torch.tensor(expected, dtype=torch.float64))
    assert not advantages[~mask].any()


@given(episodes())
def test_values_of_observation_tokens_do_not_matter(
    episode: tuple[Tensor, Tensor, Tensor],
) -> None:
    rewards, values, mask = episode
    other = torch.where(mask, values, torch.nan)
    torch.testing.assert_close(run_gae(rewards, values, mask), run_gae(rewards, other, mask))


def test_a_truncated_episode_bootstraps_and_a_terminated_one_does_not() -> None:
    rewards, values, mask = torch.ones(2, 1), torch.full((2, 1), 2.0), torch.ones(2, 1).bool()
    terminated, bootstrap_value = torch.tensor([True, False]), torch.tensor([10.0, 10.0])
    advantages = gae(rewards, values, mask, terminated, bootstrap_value, gamma=0.5, lam=1.0)
    assert advantages.tolist() == [[1 - 2], [1 + 0.5 * 10 - 2]]


def test_padding_behind_the_last_action_changes_nothing() -> None:
    rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.25]])
    mask = torch.tensor([[True, True]])
    padding = torch.zeros(1, 3)
    padded = run_gae(
        torch.cat([rewards, padding], dim=1),
        torch.cat([values, padding + 7], dim=1),
        torch.cat([mask, padding.bool()], dim=1),
        bootstrap=3.0,
    )
    torch.testing.assert_close(padded[:, :2], run_gae(rewards, values, mask, bootstrap=3.0))


def test_a_reward_on_an_observation_belongs_to_the_action_before_it() -> None:
    values, mask = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[True, False, False, True]])
    on_observations = run_gae(torch.tensor([[0.0, 2.0, 3.0, 1.0]]), values, mask)
    on_the_action = run_gae(torch.tensor([[5.0, 0.0, 0.0, 1.0]]), values, mask)
    torch.testing.assert_close(on_observations, on_the_action)


def test_advantages_are_targets_without_gradient() -> None:
    values = torch.ones(1, 2, requires_grad=True)
    mask = torch.ones(1, 2).bool()
    advantages = run_gae(torch.ones(1, 2), values, mask)
    assert not advantages.requires_grad
    assert returns(advantages, values.detach(), mask).tolist() == (advantages + 1).tolist()
