"""Advantages from rewards: group and turn baselines, returns, generalized advantages.

    rewards of a group ------- group_advantages -------------------------> GRPO, Dr. GRPO, RLOO
    rewards of turns --------- turn_advantages --------------------------> GRPO, credit = "turn"
    rewards of tokens -------- discounted_returns --- whiten ------------> REINFORCE++
    rewards and values ------- gae ------------------ whiten ------------> PPO
    the same, as streams ----- stream_gae -------------------------------> PPO of networks

If the divergence is part of the reward, it is a reward per token (`kl_penalty`). Only the learner
can compute it. PPO adds it to the rewards before `gae`. The other algorithms compute advantages
from rewards without it, and add its discounted returns later. The result is the same, because
returns are sums.

Whitening does not depend on how the rows of a step are split: `moments` of micro-batches add up
over micro-batches and ranks, and every micro-batch is whitened with the total.

Shapes: N = sequences, T = token positions, G = episodes of one group, K = turns of the longest
episode. Masks are bool, True = sampled by the policy. A reward of NaN means "not scored".
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["none", "group", "batch"]

_STD_EPS = 1e-4
_WHITENING_EPS = 1e-8


def group_advantages(rewards: Tensor, baseline: Baseline = "mean", scale: Scale = "none") -> Tensor:
    """Return the advantages [num_groups, G] of `rewards` [num_groups, G].

        mean            A_i = r_i - mean(r)                (GRPO, arXiv 2402.03300)
        leave_one_out   A_i = r_i - mean(r without r_i)    (RLOO, arXiv 2402.14740)
        none            A_i = r_i

    `scale` selects the standard deviation (with n - 1) that divides the advantages, plus 1e-4:
    that of the group (GRPO), that of all rewards (arXiv 2508.08221), or none (Dr. GRPO, arXiv
    2503.20783). An unscored episode gets 0 and does not count in any mean or deviation. A
    zero-variance group gets exact zeros, unless the baseline is "none".
    """
    if baseline == "none":
        return rewards.nan_to_num(nan=0.0)
    is_scored = ~rewards.isnan()
    num_scored = is_scored.sum(-1, keepdim=True)
    advantages = rewards - rewards.nanmean(-1, keepdim=True)
    if baseline == "leave_one_out":
        advantages = advantages * num_scored / (num_scored - 1)
    if scale == "group":
        advantages = advantages / (_std(rewards) + _STD_EPS)
    elif scale == "batch":
        advantages = advantages / (_std(rewards.flatten()) + _STD_EPS)
    return torch.where(is_scored & ~is_zero_variance_group(rewards)[:, None], advantages, 0.0)


def turn_advantages(
    rewards: Tensor, baseline: Baseline = "mean", scale: Scale = "none", gamma: float = 1.0
) -> Tensor:
    """Return the advantages [num_groups, G, K] of turns with `rewards` [num_groups, G, K].

    A turn is credited with its own reward and all later rewards, compared with the episodes of
    its group that reached the same turn:

        R_ik = sum over j >= k of gamma^(j - k) * r_ij        A_ik = R_ik - mean over i of R_ik

    A turn that was not reached, or whose episode is unscored, is NaN and gets 0. A turn that only
    one episode reached also gets 0: the mean of an earlier turn belongs to another state and, if
    every turn has a cost, would reward long episodes.
    """
    returns = torch.zeros_like(rewards)
    next_return = torch.zeros_like(rewards[..., 0])
    for turn in reversed(range(rewards.shape[-1])):
        returns[..., turn] = rewards[..., turn] + gamma * next_return
        next_return = returns[..., turn].nan_to_num(nan=0.0)
    returns_by_turn = returns.transpose(1, 2)
    advantages = group_advantages(returns_by_turn.flatten(0, 1), baseline, scale)
    return advantages.view(returns_by_turn.shape).transpose(1, 2)


def is_zero_variance_group(rewards: Tensor) -> Tensor:
    """Return a bool mask [num_groups] of groups without a learning signal, from `rewards` [_, G].

    All scored rewards of such a group are equal, or fewer than two are scored (arXiv 2503.14476,
    section 3.2). The comparison is exact, because rounding can give equal rewards a nonzero
    standard deviation.
    """
    is_scored = ~rewards.isnan()
    min_rewards = rewards.nan_to_num(nan=torch.inf).amin(-1)
    max_rewards = rewards.nan_to_num(nan=-torch.inf).amax(-1)
    return (min_rewards == max_rewards) | (is_scored.sum(-1) < 2)


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
    """Return generalized advantages [N, T] (arXiv 1506.02438), zero outside `action_mask` [N, T].

        delta_t = r_t + gamma * V_t' - V_t        A_t = delta_t + gamma * lam * A_t'

    t' is the next position in the mask. Positions outside the mask (observations, padding) are
    skipped: their values are not used, and their rewards are added to the preceding action.
    After the last action of a row, V is 0 if `terminated` [N], otherwise `bootstrap_value` [N],
    the value of the observation at which the episode was truncated.
    """
    next_value = torch.where(terminated, 0.0, bootstrap_value)
    next_advantage = torch.zeros_like(next_value)
    skipped_reward = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        is_action, value = action_mask[:, t], values[:, t]
        reward = rewards[:, t] + skipped_reward
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        advantages[:, t] = torch.where(is_action, advantage, 0.0)
        next_advantage = torch.where(is_action, advantage, next_advantage)
        next_value = torch.where(is_action, value, next_value)
        skipped_reward = torch.where(is_action, 0.0, reward)
    return advantages


@torch.no_grad()
def stream_gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    is_last: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Return generalized advantages [T, N] of N streams of T steps, with episodes back to back.

        delta_t = r_t + gamma * V'_t - V_t    A_t = delta_t + gamma * lam * (1 - last_t) * A_t+1

    An advantage does not include later episodes of its stream. The last row of `next_values` stands
    for everything after the last step.

    All tensors are [T, N]. `next_values` are those of the observations after each step: 0 after a
    terminated episode, the value of the last observation (not of the next episode's first) after
    a truncated episode. `is_last` is True at the last step of each episode.
    """
    delta = rewards + gamma * next_values - values
    # torch.where of two numbers would be float32, whatever the rewards are.
    decay = (~is_last).to(delta.dtype) * (gamma * lam)
    advantages = torch.empty_like(delta)
    next_advantage = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        next_advantage = torch.addcmul(delta[t], decay[t], next_advantage, out=advantages[t])
    return advantages


def critic_targets(advantages: Tensor, values: Tensor, action_mask: Tensor) -> Tensor:
    """Return the targets [N, T] of the critic: A_t + V_t, zero outside `action_mask`."""
    return torch.where(action_mask, advantages + values, 0.0)


def discounted_returns(rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
    """Return each token's return [N, T]: R_t = r_t + gamma * R_t', zero outside `action_mask`.

    These are the token returns of REINFORCE++ (arXiv 2501.03262). They equal `gae` with a critic
    that always predicts 0. t' is the next position in the mask.
    """
    zeros = torch.zeros_like(rewards)
    terminated = torch.ones_like(action_mask[:, 0])
    return gae(rewards, zeros, action_mask, terminated, zeros[:, 0], gamma, lam=1.0)


@torch.no_grad()
def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Return rewards [N, T] for staying near the reference: -kl_coef * k1, zero outside `mask`.

    k1 = log pi - log ref, with pi the policy that sampled (arXiv 2203.02155). As a reward, k1 has
    the gradient of the divergence; the other estimators do not.
    """
    return torch.where(mask, kl_coef * (ref_logprobs - logprobs), 0.0)


@torch.no_grad()
def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Return count, sum, and sum of squares [3] of the `values` [N, T] in `mask`, in float64."""
    masked_values = torch.where(mask, values, 0.0).double()
    return torch.stack([mask.sum().double(), masked_values.sum(), masked_values.square().sum()])


def mean(total_moments: Tensor) -> Tensor:
    """Return the mean, from the summed `moments` [3]."""
    return total_moments[1] / total_moments[0].clamp(min=1)


def variance(total_moments: Tensor) -> Tensor:
    """Return the variance with n - 1, from the summed `moments` [3]; 0 if fewer than two values.

    A critic explains 1 - variance(returns - values) / variance(returns).
    """
    count, _, sum_of_squares = total_moments
    sum_of_squared_deviations = sum_of_squares - count * mean(total_moments).square()
    return sum_of_squared_deviations.clamp(min=0) / (count - 1).clamp(min=1)


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, total_moments: Tensor) -> Tensor:
    """Return (x - mean) / (std + 1e-8) [N, T] by the summed `moments` [3], zero outside `mask`.

    Used for the advantages of PPO (https://github.com/vwxyzjn/cleanrl, `ppo.py`) and REINFORCE++
    (arXiv 2501.03262).
    """
    std = variance(total_moments).sqrt() + _WHITENING_EPS
    return torch.where(mask, (values - mean(total_moments)) / std, 0.0)


def _std(rewards: Tensor) -> Tensor:
    """Return each row's standard deviation of scored rewards, with n - 1; NaN if fewer than two."""
    num_scored = (~rewards.isnan()).sum(-1, keepdim=True)
    deviations = rewards - rewards.nanmean(-1, keepdim=True)
    return (deviations.square().nansum(-1, keepdim=True) / (num_scored - 1)).sqrt()
