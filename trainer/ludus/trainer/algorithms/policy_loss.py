"""The loss that one micro-batch adds to an optimizer step of GRPO.

Shapes: N = sequences, T = token positions. Masks are bool [N, T], True = sampled by the policy.
What stands outside the mask is never read: it may be nan, and its gradient is exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ludus.proto.config import (
    AlgorithmConfig,
    CispoLoss,
    Correction,
    GspoLoss,
    SequenceTis,
    TokenTis,
)
from ludus.trainer.algorithms.aggregation import aggregate
from ludus.trainer.algorithms.losses import clipped_surrogate, is_clipped, kl
from ludus.trainer.algorithms.ratios import (
    geometric_mask,
    sequence_log_ratio,
    sequence_tis,
    token_log_ratio,
    token_tis,
)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """One micro-batch's part of a step: scalars that add up over micro-batches and ranks."""

    loss: Tensor
    """Already divided by the step's denominator; the only field with a gradient."""
    num_tokens: Tensor
    """Sampled tokens, those of masked sequences included. Divide the sums below by it."""
    num_clipped_tokens: Tensor
    """Tokens whose ratio the clip holds."""
    num_masked_sequences: Tensor
    """Sequences that the geometric mask left out."""
    entropy_sum: Tensor
    ref_kl_sum: Tensor
    """k3 of the learner from the reference model; 0 without one."""
    mismatch_kl_sum: Tensor
    """k3 of the sampler from the learner when the step began."""


def grpo_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    rollout_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    entropy: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    config: AlgorithmConfig,
    denominator: float,
    entropy_coef: float,
    kl_coef: float,
) -> LossTerms:
    """The loss of these rows, and the sums behind its metrics.

        l_t = w_t * clip_t + kl_coef * k3_t - entropy_coef * H_t

    with clip_t the clipped loss on pi / pi', w_t the detached weight for pi' / mu, k3_t the
    divergence from the reference model. A sequence outside the geometric mask gives nothing
    to any term but still counts in `denominator`: masking must not enlarge the step.

    All are [N, T]; `advantages` may be [N, 1]. `old_logprobs` None: the learner has
    not moved in this step, so pi' = pi. For `config.old_logprobs` "rollout", pass the
    `rollout_logprobs` as old.
    """
    _check_reference(ref_logprobs, kl_coef)

    def sampled(values: Tensor) -> Tensor:
        return torch.where(loss_mask, values, 0.0)

    new = sampled(logprobs)
    old = new.detach() if old_logprobs is None else sampled(old_logprobs).detach()
    ref = new.detach() if ref_logprobs is None else sampled(ref_logprobs).detach()
    rollout = sampled(rollout_logprobs).detach()
    entropy = sampled(entropy)
    ref_kl = kl(new, ref)
    policy, clipped = _policy_terms(new, old, advantages, loss_mask, config)
    weight = _correction_weight(old, rollout, loss_mask, config.correction)
    keep = _kept_sequences(old, rollout, loss_mask, config)

    per_token = weight * policy + kl_coef * ref_kl - entropy_coef * entropy
    per_token = torch.where(keep[:, None], per_token, 0.0)
    return LossTerms(
        loss=aggregate(per_token, loss_mask, config.aggregation, denominator),
        num_tokens=loss_mask.sum(),
        num_clipped_tokens=(clipped & loss_mask).sum(),
        num_masked_sequences=(~keep).sum(),
        entropy_sum=entropy.detach().sum(),
        ref_kl_sum=ref_kl.detach().sum(),
        mismatch_kl_sum=kl(rollout, old).sum(),
    )


def _check_reference(ref_logprobs: Tensor | None, kl_coef: float) -> None:
    if ref_logprobs is None and kl_coef > 0:
        raise ValueError(
            f"ref_logprobs expected a tensor for kl_coef = {kl_coef}, got None; "
            "compute them with the reference model or set kl_coef = 0"
        )


def _policy_terms(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """The clipped loss per token, and where the clip held."""
    loss = config.loss
    assert not isinstance(loss, CispoLoss)
    if isinstance(loss, GspoLoss):
        log_ratio, dual_clip = sequence_log_ratio(new, old, mask), None
    else:
        log_ratio, dual_clip = token_log_ratio(new, old), loss.dual_clip
    return (
        clipped_surrogate(log_ratio, advantages, loss.clip_low, loss.clip_high, dual_clip),
        is_clipped(log_ratio, advantages, loss.clip_low, loss.clip_high),
    )


def _correction_weight(
    old: Tensor, rollout: Tensor, mask: Tensor, correction: Correction
) -> Tensor:
    """The weight for pi' / mu, [N, T] or [N, 1]."""
    if isinstance(correction, TokenTis):
        return token_tis(old, rollout, correction.cap)
    if isinstance(correction, SequenceTis):
        return sequence_tis(old, rollout, mask, correction.cap)[:, None]
    return torch.ones_like(old)


def _kept_sequences(old: Tensor, rollout: Tensor, mask: Tensor, config: AlgorithmConfig) -> Tensor:
    """True [N] for the sequences that the geometric mask lets through."""
    if config.geometric_mask is None:
        return torch.ones_like(mask[:, 0])
    low, high = config.geometric_mask
    return geometric_mask(old, rollout, mask, low, high)
