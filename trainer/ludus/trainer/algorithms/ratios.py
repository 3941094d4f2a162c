"""Ratios between policies, and weights that correct for sampling from another policy.

    log mu    rollout_logprobs   the sampler: the log-probs that the engine returned
    log pi'   old_logprobs       the learner when the optimizer step began
    log pi    logprobs           the learner now

The loss clips pi / pi' (the distance that this step has moved). The difference rho = pi' / mu
(staleness and numerics of the sampler) is corrected by a weight. Keeping the two apart is
decoupled PPO (arXiv 2110.00641, 2505.24298).

Shapes: N = sequences, T = token positions. Masks are bool, True = sampled by the policy.
Weights and masks carry no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.proto.config import Correction, IcePop, SequenceMask, SequenceTis, TokenTis

_MAX_LOG_RATIO = 20.0
"""Bound that keeps exp() finite: an infinite ratio times a zero advantage, or gradient, is NaN."""


def token_log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return log r_t = log pi - log pi' [N, T], within +-20."""
    return (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return log s_{i,t} [N, T] of GSPO: one value per row, with a gradient per token.

    log s_i = mean over tokens of (log pi - log pi'), and, with sg the stop-gradient,
    log s_{i,t} = sg[log s_i] + log pi_t - sg[log pi_t] (arXiv 2507.18071).
    """
    log_s = _row_mean(logprobs - old_logprobs, mask).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return log_s.detach()[:, None] + logprobs - logprobs.detach()


def correction_weight(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, correction: Correction
) -> Tensor:
    """Return the weight for rho of the configured correction, [N, T] or [N, 1]."""
    match correction:
        case TokenTis(cap=cap):
            return token_tis(old_logprobs, rollout_logprobs, cap)
        case SequenceTis(cap=cap):
            return sequence_tis(old_logprobs, rollout_logprobs, mask, cap)[:, None]
        case SequenceMask(cap=cap):
            return sequence_mask(old_logprobs, rollout_logprobs, mask, cap)[:, None]
        case IcePop(low=low, high=high):
            return icepop(old_logprobs, rollout_logprobs, low, high)
    return torch.ones_like(old_logprobs)


@torch.no_grad()
def token_tis(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """Return min(rho_t, cap) [N, T]: a truncated importance weight per token (arXiv 1802.01561)."""
    return (old_logprobs - rollout_logprobs).exp().clamp(max=cap)


@torch.no_grad()
def sequence_tis(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cap: float
) -> Tensor:
    """Return min(rho_i, cap) [N], with rho_i the product of a row's rho_t."""
    return _row_sum(old_logprobs - rollout_logprobs, mask).exp().clamp(max=cap)


@torch.no_grad()
def sequence_mask(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cap: float
) -> Tensor:
    """Return rho_i [N], or 0 if it exceeds `cap`.

    The product exceeds any cap in a long enough row; `geometric_mask` does not have that problem.
    """
    weight = _row_sum(old_logprobs - rollout_logprobs, mask).exp()
    return torch.where(weight > cap, 0.0, weight)


@torch.no_grad()
def geometric_mask(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float
) -> Tensor:
    """Return a bool mask [N] of rows whose geometric mean of rho_t is in [low, high].

    Unlike the product, the mean of many small differences does not grow with the row's length.
    """
    mean_ratio = _row_mean(old_logprobs - rollout_logprobs, mask).exp()
    return (mean_ratio >= low) & (mean_ratio <= high)


@torch.no_grad()
def icepop(old_logprobs: Tensor, rollout_logprobs: Tensor, low: float, high: float) -> Tensor:
    """Return rho_t [N, T], or 0 outside [low, high] (arXiv 2510.18855)."""
    weight = (old_logprobs - rollout_logprobs).exp()
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)


def _row_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(-1)


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return _row_sum(values, mask) / mask.sum(-1).clamp(min=1)
