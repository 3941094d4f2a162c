"""From rewards to advantages: baselines of groups and turns, returns, generalised advantages.

    rewards of a group ----- group_advantages -------------------------> GRPO, Dr. GRPO, RLOO
    rewards of its turns --- turn_advantages --------------------------> GRPO, credit = "turn"
    rewards of tokens ------ discounted_returns --- moments.whiten ----> REINFORCE++
    rewards and values ----- gae ------------------ moments.whiten ----> PPO
    the same in streams ---- stream_gae --------------------------------> PPO of networks

A divergence that is placed in the reward is a reward of tokens, `kl_penalty`, and known to the
learner only. PPO adds it to the rewards before `gae`; where advantages were made from rewards
alone, its discounted returns are added to them (returns are sums, so the order is free).

Shapes: N = sequences, T = token positions, G = episodes of one task, K = turns of the longest
episode. Masks are bool, True = sampled by the policy. A reward of nan means "not scored".
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["none", "group", "batch"]

_STD_EPS = 1e-4


def group_advantages(rewards: Tensor, baseline: Baseline = "mean", scale: Scale = "none") -> Tensor:
    """Advantages [num_groups, G] of `rewards` [num_groups, G].

        mean            A_i = r_i - mean(r)                (GRPO, arXiv 2402.03300)
        leave_one_out   A_i = r_i - mean(r without r_i)    (RLOO, arXiv 2402.14740)
        none            A_i = r_i

    `scale` divides by std + 1e-4, std with n - 1: of the group (GRPO), of all rewards
    (arXiv 2508.08221), or not at all (Dr. GRPO, arXiv 2503.20783). An unscored episode gets 0
    and enters no mean and no std. A zero-variance group gets exact zeros, unless there is no
    baseline.
    """
    if baseline == "none":
        return rewards.nan_to_num(nan=0.0)
    scored = ~rewards.isnan()
    num_scored = scored.sum(-1, keepdim=True)
    advantages = rewards - rewards.nanmean(-1, keepdim=True)
    if baseline == "leave_one_out":
        advantages = advantages * num_scored / (num_scored - 1)
    if scale == "group":
        advantages = advantages / (_std(rewards, dim=-1) + _STD_EPS)
    elif scale == "batch":
        advantages = advantages / (_std(rewards.flatten(), dim=0) + _STD_EPS)
    return torch.where(scored & ~is_zero_variance_group(rewards)[:, None], advantages, 0.0)


def turn_advantages(
    rewards: Tensor, baseline: Baseline = "mean", scale: Scale = "none", gamma: float = 1.0
) -> Tensor:
    """Advantages [num_groups, G, K] of the turns' `rewards` [num_groups, G, K].

    A turn is credited with what came from it on, against the episodes of its group that
    reached the same turn:

        R_ik = sum over j >= k of gamma^(j - k) * r_ij        A_ik = R_ik - mean over i of R_ik

    A turn that was not reached, or whose episode is unscored, holds nan and gets 0. So does a
    turn that only one episode reached: the mean of an earlier turn is that of another state,
    and where every turn costs something, it would praise those who linger.
    """
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[..., 0])
    for turn in reversed(range(rewards.shape[-1])):
        returns[..., turn] = rewards[..., turn] + gamma * following
        following = returns[..., turn].nan_to_num(nan=0.0)
    by_turn = returns.transpose(1, 2)
    advantages = group_advantages(by_turn.flatten(0, 1), baseline, scale)
    return advantages.view(by_turn.shape).transpose(1, 2)


def is_zero_variance_group(rewards: Tensor) -> Tensor:
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


@torch.no_grad()
def stream_gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    ended: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """The same advantages [T, N] where episodes follow each other in N streams of T steps.

        delta_t = r_t + gamma * V'_t - V_t    A_t = delta_t + gamma * lam * (1 - ended_t) * A_t+1

    `next_values` [T, N] are of what followed each step: 0 after one that terminated, the value of
    the last observation, not of the next episode's first, after one that was cut off. Nothing
    flows over the end of an episode, and the last step of a stream goes on with its next value.
    """
    delta = rewards + gamma * next_values - values
    flows = torch.where(ended, 0.0, gamma * lam)
    advantages = torch.empty_like(delta)
    following = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        following = torch.addcmul(delta[t], flows[t], following, out=advantages[t])
    return advantages


def returns(advantages: Tensor, values: Tensor, action_mask: Tensor) -> Tensor:
    """What the critic should have said [N, T]: A_t + V_t, zero outside `action_mask`."""
    return torch.where(action_mask, advantages + values, 0.0)


def discounted_returns(rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
    """What each token led to [N, T]: R_t = r_t + gamma * R_t', zero outside `action_mask`.

    The token returns of REINFORCE++ (arXiv 2501.03262), which are those of `gae` with a critic
    that always says 0. t' is the next position in the mask.
    """
    nothing = torch.zeros_like(rewards)
    ended = torch.ones_like(action_mask[:, 0])
    return gae(rewards, nothing, action_mask, ended, nothing[:, 0], gamma, lam=1.0)


@torch.no_grad()
def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards [N, T] for staying near the reference: -kl_coef * k1, zero outside `mask`.

    k1 = log pi - log ref, of the policy that sampled (arXiv 2203.02155). As a reward, k1 has
    the gradient of the divergence; the other estimators do not.
    """
    return torch.where(mask, kl_coef * (ref_logprobs - logprobs), 0.0)


def _std(rewards: Tensor, dim: int) -> Tensor:
    """Standard deviation of the scored rewards, with n - 1; nan where fewer than two are."""
    num_scored = (~rewards.isnan()).sum(dim, keepdim=True)
    squares = (rewards - rewards.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (squares / (num_scored - 1)).sqrt()
