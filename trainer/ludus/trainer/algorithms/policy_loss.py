"""The loss that one micro-batch adds to an optimizer step, for every kind of algorithm.

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
    ClipLoss,
    Correction,
    FunctionLoss,
    GspoLoss,
    IcePop,
    SequenceMask,
    SequenceTis,
    TokenTis,
)
from ludus.trainer.algorithms.aggregation import aggregate
from ludus.trainer.algorithms.losses import (
    cispo_loss,
    clip_loss,
    gspo_loss,
    is_clipped,
    is_outside,
    kl,
)
from ludus.trainer.algorithms.own_loss import own_loss
from ludus.trainer.algorithms.ratios import (
    geometric_mask,
    icepop,
    sequence_log_ratio,
    sequence_mask,
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
    num_masked_tokens: Tensor
    """Tokens that the correction or the geometric mask left out."""
    num_masked_sequences: Tensor
    """Sequences of which they left out every token."""
    entropy_sum: Tensor
    ref_kl_sum: Tensor
    """k3 of the learner from the reference model; 0 without one."""
    mismatch_kl_sum: Tensor
    """k3 of the sampler from the learner when the step began."""


def policy_gradient_loss(
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

        l_t = w_t * policy_t + kl_coef * kl_t - entropy_coef * H_t

    with policy_t the loss on pi / pi' (`config.loss`), w_t the detached weight for pi' / mu
    (`config.correction`), kl_t the divergence from the reference model unless it is in the
    advantages already (`config.kl_placement`). A sequence outside the geometric mask gives
    nothing to any term but still counts in `denominator`: masking must not enlarge the step.

    All are [N, T]; `advantages` may be [N, 1]; kinds of algorithm differ only in how they are
    made. `old_logprobs` None: the learner has not moved in this step, so pi' = pi. For
    `config.old_logprobs` "rollout", pass the `rollout_logprobs` as old.
    """
    _check_shapes(advantages, loss_mask)
    kl_coef = kl_coef if config.kl_placement == "loss" else 0.0
    _check_reference(ref_logprobs, kl_coef)

    def sampled(values: Tensor) -> Tensor:
        return torch.where(loss_mask, values, 0.0)

    new = sampled(logprobs)
    old = new.detach() if old_logprobs is None else sampled(old_logprobs).detach()
    ref = new.detach() if ref_logprobs is None else sampled(ref_logprobs).detach()
    rollout = sampled(rollout_logprobs).detach()
    entropy = sampled(entropy)
    policy, clipped = _policy_terms(new, old, sampled(advantages).detach(), loss_mask, config)
    weight = _correction_weight(old, rollout, loss_mask, config.correction)
    keep = _kept_sequences(old, rollout, loss_mask, config)[:, None]

    per_token = weight * policy
    if kl_coef:
        per_token = per_token + kl_coef * kl(new, ref, config.kl_estimator)
    if entropy_coef:
        per_token = per_token - entropy_coef * entropy
    per_token = torch.where(keep, per_token, 0.0)
    trained = keep & (weight > 0) & loss_mask
    return LossTerms(
        loss=aggregate(per_token, loss_mask, config.aggregation, denominator),
        num_tokens=loss_mask.sum(),
        num_clipped_tokens=(clipped & loss_mask).sum(),
        num_masked_tokens=(loss_mask & ~trained).sum(),
        num_masked_sequences=(loss_mask.any(-1) & ~trained.any(-1)).sum(),
        entropy_sum=entropy.detach().sum(),
        ref_kl_sum=kl(new, ref).detach().sum(),
        mismatch_kl_sum=kl(rollout, old).sum(),
    )


def _check_shapes(advantages: Tensor, mask: Tensor) -> None:
    """Refuse [N], which would be read as [1, T] wherever N happens to be T."""
    if advantages.dim() != 2 or len(advantages) != len(mask):
        raise ValueError(
            f"advantages expected shape {list(mask.shape)} or [{len(mask)}, 1], got "
            f"{list(advantages.shape)}; give each token, or each sequence in a column, its own"
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
    """The policy loss per token, and where its clip held."""
    match config.loss:
        case FunctionLoss(function=path):
            return own_loss(path, new, old, advantages, mask), torch.zeros_like(mask)
        case CispoLoss(clip_low=low, clip_high=high):
            held = is_outside(token_log_ratio(new, old), low, high)
            return cispo_loss(new, old, advantages, low, high), held
        case GspoLoss(clip_low=low, clip_high=high):
            held = is_clipped(sequence_log_ratio(new, old, mask), advantages, low, high)
            return gspo_loss(new, old, advantages, mask, low, high), held
        case ClipLoss(clip_low=low, clip_high=high, dual_clip=dual_clip):
            held = is_clipped(token_log_ratio(new, old), advantages, low, high)
            return clip_loss(new, old, advantages, low, high, dual_clip), held


def _correction_weight(
    old: Tensor, rollout: Tensor, mask: Tensor, correction: Correction
) -> Tensor:
    """The weight for pi' / mu, [N, T] or [N, 1]."""
    match correction:
        case TokenTis():
            return token_tis(old, rollout, correction.cap)
        case SequenceTis():
            return sequence_tis(old, rollout, mask, correction.cap)[:, None]
        case SequenceMask():
            return sequence_mask(old, rollout, mask, correction.cap)[:, None]
        case IcePop():
            return icepop(old, rollout, correction.low, correction.high)
    return torch.ones_like(old)


def _kept_sequences(old: Tensor, rollout: Tensor, mask: Tensor, config: AlgorithmConfig) -> Tensor:
    """True [N] for the sequences that the geometric mask lets through."""
    if config.geometric_mask is None:
        return torch.ones_like(mask[:, 0])
    low, high = config.geometric_mask
    return geometric_mask(old, rollout, mask, low, high)
