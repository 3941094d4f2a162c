"""Policy losses and divergences per token.

Shapes: N = sequences, T = token positions. Masks are bool [N, T], True = sampled by the policy.
`advantages` is [N, T], or [N, 1] for one per sequence. r = pi / pi' is the ratio of the learner
now to the learner when the optimizer step began (see `ratios`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ludus.trainer.algorithms.ratios import sequence_log_ratio, token_log_ratio


def clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's loss [N, T] (arXiv 1707.06347).

    clip_high > clip_low is DAPO's clip-higher (2503.14476); for dual clip see 1912.09729.
    """
    log_ratio = token_log_ratio(logprobs, old_logprobs)
    return clipped_surrogate(log_ratio, advantages, clip_low, clip_high, dual_clip)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """GSPO's loss [N, T] (arXiv 2507.18071): to be aggregated as the mean over sequences."""
    log_ratio = sequence_log_ratio(logprobs, old_logprobs, mask)
    return clipped_surrogate(log_ratio, advantages, clip_low, clip_high)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """CISPO's loss [N, T] (arXiv 2506.13585): -sg[clip(r, 1 - low, 1 + high)] * A * log pi.

    The weight is clipped, not the gradient: every token keeps one.
    """
    ratio = token_log_ratio(logprobs, old_logprobs).exp()
    return -ratio.clamp(1 - clip_low, 1 + clip_high).detach() * advantages * logprobs


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """-min(r * A, clip(r, 1 - low, 1 + high) * A) [N, T].

    Where A < 0 nothing bounds r * |A| from above; `dual_clip` does, at dual_clip * |A|.
    """
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def is_clipped(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """True [N, T] where the clip (not the dual clip) holds the ratio, so the gradient is zero."""
    ratio = log_ratio.detach().exp()
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    return too_high | too_low


def is_outside(log_ratio: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """True [N, T] where the ratio is outside [1 - low, 1 + high], whatever the advantage."""
    ratio = log_ratio.detach().exp()
    return (ratio < 1 - clip_low) | (ratio > 1 + clip_high)


def kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    input_clamp: float = 20.0,
) -> Tensor:
    """Estimates [N, T] of KL(pi || ref) from samples of pi (http://joschu.net/blog/kl-approx.html).

    With d = log ref - log pi: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1. In k3, d is clamped
    from above to `input_clamp`, or exp overflows; far below it falls evenly, with its gradient.
    """
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    d = d.clamp(max=input_clamp)
    return d.expm1() - d
