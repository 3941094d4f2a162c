"""From rewards to advantages: group baselines for GRPO, generalised advantages for PPO.

Shapes: N = sequences, T = token positions, G = episodes of one task. Masks are bool,
True = sampled by the policy. A reward of nan means "not scored".
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["none", "group", "batch"]

_STD_EPS = 1e-4


def group_advantages(rewards: Tensor, baseline: Baseline = "mean", scale: Scale = "none") -> Tensor:
    """Advantages [num_groups, G] of `rewards` [num_groups, G].

        mean            A_i = r_i - mean(r)                (GRPO, arXiv 2402.03300)
        leave_one_out   A_i = r_i - mean(r without r_i)    (RLOO, arXiv 2402.14740)

    `scale` divides by std + 1e-4, std with n - 1: of the group (GRPO), of all rewards
    (arXiv 2508.08221), or not at all (Dr. GRPO, arXiv 2503.20783). An unscored episode gets 0
    and enters no mean and no std. A dead group gets exact zeros.
    """
    scored = ~rewards.isnan()
    num_scored = scored.sum(-1, keepdim=True)
    advantages = rewards - rewards.nanmean(-1, keepdim=True)
    if baseline == "leave_one_out":
        advantages = advantages * num_scored / (num_scored - 1)
    if scale == "group":
        advantages = advantages / (_std(rewards, dim=-1) + _STD_EPS)
    elif scale == "batch":
        advantages = advantages / (_std(rewards.flatten(), dim=0) + _STD_EPS)
    return torch.where(scored & ~is_dead_group(rewards)[:, None], advantages, 0.0)


def is_dead_group(rewards: Tensor) -> Tensor:
    """True [num_groups] where a group of `rewards` [num_groups, G] teaches nothing.

    All scored rewards are equal, or fewer than two are scored (arXiv 2503.14476, section 3.2).
    Equality is exact: the std of equal rewards can be off zero by float noise.
    """
    scored = ~rewards.isnan()
    lowest = rewards.nan_to_num(nan=torch.inf).amin(-1)
    highest = rewards.nan_to_num(nan=-torch.inf).amax(-1)
    return (lowest == highest) | (scored.sum(-1) < 2)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    terminated: Tensor,
    bootstrap_value: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Tensor:
    """Generalised advantages [N, T] (arXiv 1506.02438), zero outside `action_mask` [N, T].

        delta_t = r_t + gamma * V_t' - V_t        A_t = delta_t + gamma * lam * A_t'

    where t' is the next position in the mask. Positions outside it (observations, padding) are
    stepped over: their values are never read, and their rewards count for the action before
    them. After a row's last action, V is 0 if `terminated` [N], else `bootstrap_value` [N], the
    value of the observation at which the episode was cut off.
    """
    next_value = torch.where(terminated, 0.0, bootstrap_value)
    next_advantage = torch.zeros_like(next_value)
    late_reward = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        acted, value = action_mask[:, t], values[:, t]
        reward = rewards[:, t] + late_reward
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        advantages[:, t] = torch.where(acted, advantage, 0.0)
        next_advantage = torch.where(acted, advantage, next_advantage)
        next_value = torch.where(acted, value, next_value)
        late_reward = torch.where(acted, 0.0, reward)
    return advantages


def returns(advantages: Tensor, values: Tensor, action_mask: Tensor) -> Tensor:
    """What the critic should have said [N, T]: A_t + V_t, zero outside `action_mask`."""
    return torch.where(action_mask, advantages + values, 0.0)


def _std(rewards: Tensor, dim: int) -> Tensor:
    """Standard deviation of the scored rewards, with n - 1; nan where fewer than two are."""
    num_scored = (~rewards.isnan()).sum(dim, keepdim=True)
    squares = (rewards - rewards.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (squares / (num_scored - 1)).sqrt()
