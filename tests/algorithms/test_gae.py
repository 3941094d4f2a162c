from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ludus.trainer.algorithms.advantages import (
    critic_targets,
    discounted_returns,
    gae,
    kl_penalty,
)

NUMBER = st.floats(-5, 5, width=32)
DISCOUNT = st.floats(0, 1, width=32)


@st.composite
def draw_episodes(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rewards, values and mask [1, T]; only action tokens have rewards."""
    length = draw(st.integers(1, 8))
    numbers = st.lists(NUMBER, min_size=length, max_size=length)
    mask = torch.tensor([draw(st.lists(st.booleans(), min_size=length, max_size=length))])
    rewards, values = (torch.tensor([draw(numbers)], dtype=torch.float64) for _ in range(2))
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


@pytest.mark.slow
@given(draw_episodes(), DISCOUNT, DISCOUNT, NUMBER | st.none())
def test_gae_equals_the_defining_sum_over_actions(
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


@pytest.mark.slow
@given(draw_episodes())
def test_values_of_observation_tokens_have_no_effect(
    episode: tuple[Tensor, Tensor, Tensor],
) -> None:
    rewards, values, mask = episode
    other_values = torch.where(mask, values, torch.nan)
    torch.testing.assert_close(run_gae(rewards, values, mask), run_gae(rewards, other_values, mask))


def test_only_truncated_episodes_bootstrap_the_final_value() -> None:
    rewards, values, mask = torch.ones(2, 1), torch.full((2, 1), 2.0), torch.ones(2, 1).bool()
    terminated, bootstrap_value = torch.tensor([True, False]), torch.tensor([10.0, 10.0])
    advantages = gae(rewards, values, mask, terminated, bootstrap_value, gamma=0.5, lam=1.0)
    assert advantages.tolist() == [[1 - 2], [1 + 0.5 * 10 - 2]]


def test_padding_has_no_effect() -> None:
    rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.25]])
    mask = torch.tensor([[True, True]])
    padding = torch.zeros(1, 3)
    advantages = run_gae(
        torch.cat([rewards, padding], dim=1),
        torch.cat([values, padding + 7], dim=1),
        torch.cat([mask, padding.bool()], dim=1),
        bootstrap=3.0,
    )
    torch.testing.assert_close(advantages[:, :2], run_gae(rewards, values, mask, bootstrap=3.0))


def test_observation_reward_is_credited_to_the_previous_action() -> None:
    values, mask = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[True, False, False, True]])
    actual = run_gae(torch.tensor([[0.0, 2.0, 3.0, 1.0]]), values, mask)
    expected = run_gae(torch.tensor([[5.0, 0.0, 0.0, 1.0]]), values, mask)
    torch.testing.assert_close(actual, expected)


def test_advantages_have_no_gradient_and_targets_add_the_values() -> None:
    values = torch.ones(1, 2, requires_grad=True)
    mask = torch.ones(1, 2).bool()
    advantages = run_gae(torch.ones(1, 2), values, mask)
    assert not advantages.requires_grad
    assert critic_targets(advantages, values.detach(), mask).tolist() == (advantages + 1).tolist()


@pytest.mark.slow
@given(draw_episodes(), DISCOUNT)
def test_token_returns_are_discounted_sums_of_current_and_later_rewards(
    episode: tuple[Tensor, Tensor, Tensor], gamma: float
) -> None:
    rewards, _, mask = episode
    r = rewards[mask].tolist()
    expected = [sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))]
    returns = discounted_returns(rewards, mask, gamma)
    torch.testing.assert_close(returns[mask], torch.tensor(expected, dtype=torch.float64))
    assert not returns[~mask].any()


def test_kl_penalty_is_negative_scaled_log_ratio_and_sums_over_tokens() -> None:
    mask = torch.tensor([[False, True, True]])
    logprobs = torch.tensor([[torch.nan, -1.0, -0.5]])
    ref_logprobs = torch.tensor([[torch.nan, -1.5, -0.25]])
    penalty = kl_penalty(logprobs, ref_logprobs, mask, kl_coef=0.1)
    torch.testing.assert_close(penalty, torch.tensor([[0.0, -0.05, 0.025]]))
    returns = discounted_returns(penalty, mask, gamma=1.0)
    torch.testing.assert_close(returns, torch.tensor([[0.0, -0.025, 0.025]]))


def test_kl_penalty_in_the_reward_yields_the_divergence_gradient() -> None:
    """Compare exact sums over all two-token completions instead of samples."""
    generator = torch.Generator().manual_seed(0)
    logits = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((3,), (3, 3))
    ]
    ref_logits = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (3, 3))
    ]

    def compute_logprobs(token_logits: list[Tensor]) -> Tensor:  # [9, 2]
        x, y = (values.log_softmax(-1) for values in token_logits)
        return torch.stack([torch.stack([x[i], y[i, j]]) for i in range(3) for j in range(3)])

    logprobs, ref_logprobs = compute_logprobs(logits), compute_logprobs(ref_logits)
    probability = logprobs.sum(-1).exp()
    divergence = (probability * (logprobs - ref_logprobs).sum(-1)).sum()
    expected = torch.autograd.grad(divergence, logits, retain_graph=True)

    mask = torch.ones(9, 2).bool()
    advantages = discounted_returns(kl_penalty(logprobs, ref_logprobs, mask, 1.0), mask, gamma=1.0)
    surrogate = -(probability.detach()[:, None] * advantages * logprobs).sum()
    torch.testing.assert_close(torch.autograd.grad(surrogate, logits), expected)


def test_return_excludes_earlier_rewards() -> None:
    rewards, mask = torch.tensor([[5.0, 0.0, 1.0]]), torch.ones(1, 3).bool()
    assert discounted_returns(rewards, mask, 1.0).tolist() == [[6, 1, 1]]
