"""The loss that one micro-batch adds to an optimizer step of the policy.

    LossInputs -- token_losses (clip, gspo, cispo, function) --+
               -- ratios.correction_weight, geometric_mask ----+--> policy_gradient_loss
               -- kl, entropy ---------------------------------+         --> LossTerms

To add a loss, add its section to `PolicyLoss` in `ludus.proto.config.algorithm`, and its formula
and a case in `token_losses` here.

Shapes: N = sequences, T = token positions. Masks are bool [N, T], True = sampled by the policy.
r = pi / pi' is the ratio of the policy now to the policy when the optimizer step began (see
`ratios`). Values outside the mask are not used: they may be NaN, and their gradient is exactly
zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ludus.proto.config import AlgorithmConfig, CispoLoss, ClipLoss, FunctionLoss, GspoLoss
from ludus.proto.errors import ConfigError
from ludus.trainer.algorithms.aggregation import aggregate
from ludus.trainer.algorithms.ratios import (
    correction_weight,
    geometric_mask,
    sequence_log_ratio,
    token_log_ratio,
)
from ludus.trainer.core.functions import import_object

LOSS_FUNCTION_FIELD = "algorithm.loss.function"


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of the policy loss for the rows of one micro-batch; float [N, T] unless noted."""

    logprobs: Tensor
    """Log-probs under the policy now. These and the entropies carry the gradient."""
    old_logprobs: Tensor
    """Log-probs under the policy when the optimizer step began."""
    rollout_logprobs: Tensor
    """Log-probs that the engine returned."""
    ref_logprobs: Tensor | None
    """Log-probs under the reference model; None without a reference model."""
    entropies: Tensor
    """Entropies of the distributions that the tokens were sampled from."""
    advantages: Tensor
    """Advantages; [N, 1] gives all tokens of a sequence the same advantage."""
    mask: Tensor
    """bool [N, T], True = sampled by the policy."""

    def apply_mask(self) -> LossInputs:
        """Return the inputs with zeros outside the mask, and gradients only where needed."""

        def zero_outside(values: Tensor) -> Tensor:
            return torch.where(self.mask, values, 0.0)

        ref = self.ref_logprobs
        return replace(
            self,
            logprobs=zero_outside(self.logprobs),
            old_logprobs=zero_outside(self.old_logprobs).detach(),
            rollout_logprobs=zero_outside(self.rollout_logprobs).detach(),
            ref_logprobs=None if ref is None else zero_outside(ref).detach(),
            entropies=zero_outside(self.entropies),
            advantages=zero_outside(self.advantages).detach(),
        )


@dataclass(frozen=True, slots=True)
class LossTerms:
    """One micro-batch's share of a step: scalars that add up over micro-batches and ranks."""

    loss: Tensor
    """Loss, already divided by the step's denominator; the only field with a gradient."""
    num_tokens: Tensor
    """Number of sampled tokens, including those of masked sequences. Divide the sums by it."""
    num_clipped_tokens: Tensor
    """Number of tokens whose ratio was clipped."""
    num_masked_tokens: Tensor
    """Number of tokens that the correction or the geometric mask removed."""
    num_masked_sequences: Tensor
    """Number of sequences of which every token was removed."""
    entropy_sum: Tensor
    ref_kl_sum: Tensor
    """k3 of the learner from the reference model; 0 without a reference model."""
    mismatch_kl_sum: Tensor
    """k3 of the sampler from the learner when the step began."""


class TokenLosses(NamedTuple):
    """Policy losses per token."""

    losses: Tensor
    """[N, T]"""
    clip_mask: Tensor
    """bool [N, T], True where the ratio was clipped."""


def policy_gradient_loss(
    inputs: LossInputs,
    config: AlgorithmConfig,
    *,
    denominator: float,
    entropy_coef: float,
    kl_coef: float,
) -> LossTerms:
    """Return the loss of these rows, and the sums behind its metrics.

        l_t = w_t * policy_t + kl_coef * kl_t - entropy_coef * H_t

    policy_t is the loss on pi / pi' (`config.loss`), w_t the detached weight for pi' / mu
    (`config.correction`), and kl_t the divergence from the reference model, unless the advantages
    already include it (`config.kl_placement`). A sequence outside the geometric mask adds nothing
    to any term but still counts in `denominator`: masking must not enlarge the step.
    """
    _check_advantages(inputs)
    kl_coef = kl_coef if config.kl_placement == "loss" else 0.0
    if inputs.ref_logprobs is None and kl_coef > 0:
        raise ValueError(
            f"ref_logprobs must be a tensor when kl_coef = {kl_coef}, got None; compute them with "
            "the reference model or set kl_coef = 0"
        )
    inputs = inputs.apply_mask()
    new, old, rollout = inputs.logprobs, inputs.old_logprobs, inputs.rollout_logprobs
    mask = inputs.mask
    ref = new.detach() if inputs.ref_logprobs is None else inputs.ref_logprobs
    policy_losses, clip_mask = token_losses(inputs, config)
    weight = correction_weight(old, rollout, mask, config.correction)
    keep_mask = torch.ones_like(mask[:, :1])
    if config.geometric_mask is not None:
        keep_mask = geometric_mask(old, rollout, mask, *config.geometric_mask)[:, None]

    per_token = weight * policy_losses
    if kl_coef:
        per_token = per_token + kl_coef * kl(new, ref, config.kl_estimator)
    if entropy_coef:
        per_token = per_token - entropy_coef * inputs.entropies
    per_token = torch.where(keep_mask, per_token, 0.0)
    train_mask = keep_mask & (weight > 0) & mask
    return LossTerms(
        loss=aggregate(per_token, mask, config.aggregation, denominator),
        num_tokens=mask.sum(),
        num_clipped_tokens=(clip_mask & mask).sum(),
        num_masked_tokens=(mask & ~train_mask).sum(),
        num_masked_sequences=(mask.any(-1) & ~train_mask.any(-1)).sum(),
        entropy_sum=inputs.entropies.detach().sum(),
        ref_kl_sum=kl(new, ref).detach().sum(),
        mismatch_kl_sum=kl(rollout, old).sum(),
    )


def token_losses(inputs: LossInputs, config: AlgorithmConfig) -> TokenLosses:
    """Return the policy loss of each token, by the configured loss."""
    match config.loss:
        case ClipLoss():
            return clip_loss(inputs, config.loss)
        case GspoLoss():
            return gspo_loss(inputs, config.loss)
        case CispoLoss():
            return cispo_loss(inputs, config.loss)
        case FunctionLoss():
            return function_loss(inputs, config.loss)


def clip_loss(inputs: LossInputs, config: ClipLoss) -> TokenLosses:
    """Return PPO's loss per token (arXiv 1707.06347).

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476); for dual clip see arXiv
    1912.09729.
    """
    low, high = config.clip_low, config.clip_high
    log_ratio = token_log_ratio(inputs.logprobs, inputs.old_logprobs)
    losses = clipped_surrogate(log_ratio, inputs.advantages, low, high, config.dual_clip)
    return TokenLosses(losses, is_clipped(log_ratio, inputs.advantages, low, high))


def gspo_loss(inputs: LossInputs, config: GspoLoss) -> TokenLosses:
    """Return GSPO's loss per token (arXiv 2507.18071); aggregate it as the mean over sequences."""
    low, high = config.clip_low, config.clip_high
    log_ratio = sequence_log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    losses = clipped_surrogate(log_ratio, inputs.advantages, low, high)
    return TokenLosses(losses, is_clipped(log_ratio, inputs.advantages, low, high))


def cispo_loss(inputs: LossInputs, config: CispoLoss) -> TokenLosses:
    """Return CISPO's loss per token (arXiv 2506.13585).

        -sg[clip(r, 1 - low, 1 + high)] * A * log pi

    The weight is clipped, not the gradient: every token keeps its gradient.
    """
    low, high = 1 - config.clip_low, 1 + config.clip_high
    ratio = token_log_ratio(inputs.logprobs, inputs.old_logprobs).exp().detach()
    losses = -ratio.clamp(low, high) * inputs.advantages * inputs.logprobs
    return TokenLosses(losses, (ratio < low) | (ratio > high))


def function_loss(inputs: LossInputs, config: FunctionLoss) -> TokenLosses:
    """Return the losses that the user's function computes.

    The function is called with logprobs, old_logprobs, advantages and mask, [N, T] each. Only
    logprobs have a gradient, and values outside the mask are 0.

    Raises:
        ConfigError: the function fails, or does not return an [N, T] tensor with a gradient.
    """
    path, mask = config.function, inputs.mask
    function = import_object(path, LOSS_FUNCTION_FIELD)
    arguments = (
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages.expand_as(mask),
        mask,
    )
    try:
        losses: object = function(*arguments)
    except Exception as error:  # code of the user
        raise ConfigError(
            f"{LOSS_FUNCTION_FIELD} = '{path}' raised {type(error).__name__}: {error}; it must be "
            "a function of logprobs, old_logprobs, advantages and mask that returns the loss of "
            "each token"
        ) from error
    if not isinstance(losses, Tensor) or losses.shape != mask.shape:
        result = (
            f"a tensor of shape {list(losses.shape)}"
            if isinstance(losses, Tensor)
            else f"{losses!r:.100}"
        )
        raise ConfigError(
            f"{LOSS_FUNCTION_FIELD} = '{path}' must return a tensor of shape {list(mask.shape)}, "
            f"got {result}; return the loss of each token, without taking a mean"
        )
    if inputs.logprobs.requires_grad and not losses.requires_grad:
        raise ConfigError(
            f"{LOSS_FUNCTION_FIELD} = '{path}' returned losses that do not depend on logprobs, so "
            "nothing would be learned; do not detach them"
        )
    return TokenLosses(losses, torch.zeros_like(mask))


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Return -min(r * A, clip(r, 1 - low, 1 + high) * A) [N, T].

    If A < 0, r * |A| has no upper bound; `dual_clip` bounds it at dual_clip * |A|.
    """
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def is_clipped(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return a bool mask [N, T] of the tokens whose gradient the clip (not dual clip) stops."""
    ratio = log_ratio.detach().exp()
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    return too_high | too_low


def kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    input_clamp: float = 20.0,
) -> Tensor:
    """Return estimates [N, T] of KL(pi || ref) from samples of pi.

    With d = log ref - log pi: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1
    (http://joschu.net/blog/kl-approx.html). In k3, d is clamped from above to `input_clamp`,
    because exp would overflow.
    """
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    d = d.clamp(max=input_clamp)
    return d.expm1() - d


def _check_advantages(inputs: LossInputs) -> None:
    """Refuse advantages [N], which would be broadcast as [1, T] if N happens to equal T."""
    advantages, mask = inputs.advantages, inputs.mask
    if advantages.dim() != 2 or len(advantages) != len(mask):
        raise ValueError(
            f"advantages must have shape {list(mask.shape)} or [{len(mask)}, 1], got "
            f"{list(advantages.shape)}; give one advantage per token, or a column with one per "
            "sequence"
        )
