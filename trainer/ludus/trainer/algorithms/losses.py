"""Losses of the policy and of a critic for one micro-batch of an optimizer step.

    logits -- token_logprobs, entropy --> LossInputs
    LossInputs -- token_losses (clip, gspo, cispo, function) --+
               -- correction_weight, geometric_mask -----------+--> policy_gradient_loss
               -- kl, entropy ---------------------------------+         --> LossTerms
    values, returns -----------------------------------------------> value_loss

Ratios compare three policies:

    log mu    rollout_logprobs   the sampler: the log-probs that the engine returned
    log pi'   old_logprobs       the learner when the optimizer step began
    log pi    logprobs           the learner now

The loss clips r = pi / pi' (how far this step has moved the policy). A weight corrects for
rho = pi' / mu (staleness and numerics of the sampler). Treating the two ratios separately is called
decoupled PPO (arXiv 2110.00641, 2505.24298).

The denominator of a loss covers the whole optimizer step, with all ranks and micro-batches.
Each micro-batch divides its sum by this denominator, so that the shares of all micro-batches add up
to the loss. (If a data-parallel wrapper averages gradients over ranks, multiply the loss by the
number of ranks.)

To add a loss, add its section to `PolicyLoss` in `ludus.proto.config.algorithm`, and its formula
to `token_losses` here.

Shapes: N = sequences, T = token positions. Masks are bool [N, T], True = sampled by the policy.
Values outside the mask are not used: they may be NaN, and their gradient is exactly zero. A row
without sampled tokens is padding and does not count. In functions of logits, ... = any leading
axes, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ludus.proto.config import AlgorithmConfig, algorithm
from ludus.proto.errors import ConfigError
from ludus.trainer.core.functions import import_callable

Aggregation = Literal["token_mean", "sequence_mean", "constant"]

LOSS_FUNCTION_FIELD = "algorithm.loss.function"

_MAX_LOG_RATIO = 20.0
"""Bound that keeps exp() finite: an infinite ratio times a zero advantage, or gradient, is NaN."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of the policy loss for the rows of one micro-batch; float [N, T] unless noted."""

    logprobs: Tensor
    """Log-probs under the current policy. These and the entropies carry the gradient."""
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

        def zero_outside_mask(values: Tensor) -> Tensor:
            return torch.where(self.mask, values, 0.0)

        ref_logprobs = self.ref_logprobs
        return replace(
            self,
            logprobs=zero_outside_mask(self.logprobs),
            old_logprobs=zero_outside_mask(self.old_logprobs).detach(),
            rollout_logprobs=zero_outside_mask(self.rollout_logprobs).detach(),
            ref_logprobs=None if ref_logprobs is None else zero_outside_mask(ref_logprobs).detach(),
            entropies=zero_outside_mask(self.entropies),
            advantages=zero_outside_mask(self.advantages).detach(),
        )


@dataclass(frozen=True, slots=True)
class LossTerms:
    """One micro-batch's share of a step: scalars that add up over micro-batches and ranks."""

    loss: Tensor
    """Loss, already divided by the step's denominator; the only field with a gradient."""
    num_tokens: Tensor
    """Number of sampled tokens, including masked sequences. The sums below are divided by it."""
    num_clipped_tokens: Tensor
    """Number of tokens whose ratio was clipped."""
    num_masked_tokens: Tensor
    """Number of tokens that the correction or the geometric mask removed."""
    num_masked_sequences: Tensor
    """Number of sequences of which every token was removed."""
    entropy_sum: Tensor
    ref_kl_sum: Tensor
    """Sum of k3, the estimated divergence from the reference model; 0 without that model."""
    mismatch_kl_sum: Tensor
    """Sum of k3, the estimated divergence of the sampler from the learner when the step began."""


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
    (`config.correction`), and kl_t the divergence from the reference model. If the advantages
    already include the divergence (`config.kl_placement`), its term is omitted. A sequence outside
    the geometric mask adds nothing to the loss. It still counts in the sums and in `denominator`,
    because masking must not enlarge the step.
    """
    kl_coef = kl_coef if config.kl_placement == "loss" else 0.0
    inputs = inputs.apply_mask()
    mask, logprobs, old_logprobs = inputs.mask, inputs.logprobs, inputs.old_logprobs
    rollout_logprobs = inputs.rollout_logprobs
    ref_logprobs = logprobs.detach() if inputs.ref_logprobs is None else inputs.ref_logprobs
    policy_losses, clip_mask = token_losses(inputs, config.loss)
    weight = correction_weight(old_logprobs, rollout_logprobs, mask, config.correction)
    keep_mask = torch.ones_like(mask[:, :1])
    if config.geometric_mask is not None:
        low, high = config.geometric_mask
        keep_mask = geometric_mask(old_logprobs, rollout_logprobs, mask, low, high)[:, None]

    losses = weight * policy_losses
    if kl_coef:
        losses = losses + kl_coef * kl(logprobs, ref_logprobs, config.kl_estimator)
    if entropy_coef:
        losses = losses - entropy_coef * inputs.entropies
    losses = torch.where(keep_mask, losses, 0.0)
    train_mask = keep_mask & (weight > 0) & mask
    return LossTerms(
        loss=aggregate(losses, mask, config.aggregation, denominator),
        num_tokens=mask.sum(),
        num_clipped_tokens=(clip_mask & mask).sum(),
        num_masked_tokens=(mask & ~train_mask).sum(),
        num_masked_sequences=(mask.any(-1) & ~train_mask.any(-1)).sum(),
        entropy_sum=inputs.entropies.detach().sum(),
        ref_kl_sum=kl(logprobs, ref_logprobs).detach().sum(),
        mismatch_kl_sum=kl(rollout_logprobs, old_logprobs).sum(),
    )


def token_losses(inputs: LossInputs, loss: algorithm.PolicyLoss) -> TokenLosses:
    """Return the configured policy loss of each token.

        clip   -min(r * A, clip(r, 1 - low, 1 + high) * A)      (PPO, arXiv 1707.06347)
        gspo   the same with the ratio of the row, for aggregation = "sequence_mean"
                                                                (arXiv 2507.18071)
        cispo  -sg[clip(r, 1 - low, 1 + high)] * A * log pi     (arXiv 2506.13585)

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476); for dual clip see arXiv
    1912.09729. CISPO clips the weight, not the gradient: every token keeps its gradient.
    """
    advantages = inputs.advantages
    match loss:
        case algorithm.ClipLoss(clip_low=low, clip_high=high):
            log_ratio = token_log_ratio(inputs.logprobs, inputs.old_logprobs)
            losses = clipped_surrogate(log_ratio, advantages, low, high, loss.dual_clip)
            return TokenLosses(losses, is_clipped(log_ratio, advantages, low, high))
        case algorithm.GspoLoss(clip_low=low, clip_high=high):
            log_ratio = sequence_log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
            losses = clipped_surrogate(log_ratio, advantages, low, high)
            return TokenLosses(losses, is_clipped(log_ratio, advantages, low, high))
        case algorithm.CispoLoss():
            min_ratio, max_ratio = 1 - loss.clip_low, 1 + loss.clip_high
            ratio = token_log_ratio(inputs.logprobs, inputs.old_logprobs).exp().detach()
            losses = -ratio.clamp(min_ratio, max_ratio) * advantages * inputs.logprobs
            return TokenLosses(losses, (ratio < min_ratio) | (ratio > max_ratio))
        case algorithm.FunctionLoss():
            losses = _call_loss_function(inputs, loss.function)
            return TokenLosses(losses, torch.zeros_like(inputs.mask))


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None
) -> Tensor:
    """Return -min(r * A, clip(r, 1 - low, 1 + high) * A) [N, T].

    If A < 0, r * |A| has no upper bound; `dual_clip` bounds it at dual_clip * |A|.
    """
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - low, 1 + high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def is_clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return a bool mask [N, T] of the tokens whose gradient the clip (not dual clip) stops."""
    ratio = log_ratio.detach().exp()
    exceeds_upper_bound = (advantages > 0) & (ratio > 1 + high)
    exceeds_lower_bound = (advantages < 0) & (ratio < 1 - low)
    return exceeds_upper_bound | exceeds_lower_bound


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


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log softmax(logits / temperature) [...] at `targets` [...], for `logits` [..., V].

    The result is the target's logit minus logsumexp, in float32 or better. No [..., V] tensor of
    log-probs is kept.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return target_logits - logits.logsumexp(-1)


def entropy(logprobs: Tensor) -> Tensor:
    """Return -sum(p * log p) [...] in nats, for the log p [..., V] of a whole distribution.

    A token that cannot be sampled has log p = -inf and adds nothing.
    """
    finite_logprobs = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)
    return -(logprobs.exp() * finite_logprobs).sum(-1)


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


@torch.no_grad()
def correction_weight(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, correction: algorithm.Correction
) -> Tensor:
    """Return the weight of the configured correction for rho, [N, T] or [N, 1], detached.

        token_tis       min(rho_t, cap): a truncated importance weight    (arXiv 1802.01561)
        sequence_tis    min(rho_i, cap), with rho_i the product of a row's rho_t
        sequence_mask   rho_i, or 0 if it exceeds the cap
        icepop          rho_t, or 0 outside [low, high]                   (arXiv 2510.18855)

    In long rows, the product often exceeds the cap; `geometric_mask` does not have that problem.
    """
    log_rho = old_logprobs - rollout_logprobs
    match correction:
        case algorithm.TokenTis(cap=cap):
            return log_rho.exp().clamp(max=cap)
        case algorithm.SequenceTis(cap=cap):
            return _row_sum(log_rho, mask).exp().clamp(max=cap)[:, None]
        case algorithm.SequenceMask(cap=cap):
            weight = _row_sum(log_rho, mask).exp()
            return torch.where(weight > cap, 0.0, weight)[:, None]
        case algorithm.IcePop(low=low, high=high):
            weight = log_rho.exp()
            return torch.where((weight >= low) & (weight <= high), weight, 0.0)
    return torch.ones_like(old_logprobs)


@torch.no_grad()
def geometric_mask(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float
) -> Tensor:
    """Return a bool mask [N] of rows whose geometric mean of rho_t is in [low, high].

    Unlike the product, the mean of many small differences does not grow with the row's length.
    """
    mean_ratio = _row_mean(old_logprobs - rollout_logprobs, mask).exp()
    return (mean_ratio >= low) & (mean_ratio <= high)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float | None,
    denominator: float,
) -> Tensor:
    """Return these rows' share of the step's mean squared error, a scalar (arXiv 1707.06347).

        0.5 * max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2)

    V_old [N, T] are the critic's predictions when the optimizer step began. A change by more than
    `clip` does not lower the loss (https://github.com/openai/baselines, `ppo2`). With None, the
    loss is not clipped. `denominator` is the number of sampled tokens of the whole optimizer step,
    for every aggregation of the policy loss.
    """
    masked_values = torch.where(mask, values, 0.0)
    masked_returns = torch.where(mask, returns, 0.0).detach()
    clip_center = torch.where(mask, old_values, 0.0).detach() if clip is not None else masked_values
    error = squared_error(masked_values, clip_center, masked_returns, clip)
    return aggregate(0.5 * error, mask, "token_mean", denominator)


def squared_error(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> Tensor:
    """Return max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2), for any shape."""
    error = (values - returns).square()
    if clip is None:
        return error
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(error, (clipped_values - returns).square())


def aggregate(losses: Tensor, mask: Tensor, aggregation: Aggregation, denominator: float) -> Tensor:
    """Return the contribution of these rows to the loss of the step, a scalar.

    token_mean      sum of all tokens / tokens of the step              (DAPO, arXiv 2503.14476)
    sequence_mean   sum of each row's token mean / rows of the step     (GRPO, arXiv 2402.03300)
    constant        sum of all tokens / (rows of the step * max_tokens) (arXiv 2503.20783)
    """
    if not denominator > 0:
        raise ValueError(
            f"denominator must be positive, got {denominator}; "
            "skip an optimizer step without sampled tokens"
        )
    row_sums = torch.where(mask, losses, 0.0).sum(-1)
    if aggregation == "sequence_mean":
        row_sums = row_sums / mask.sum(-1).clamp(min=1)
    return row_sums.sum() / denominator


def loss_denominator(num_sampled: Tensor, aggregation: Aggregation, max_tokens: int) -> int:
    """Return the loss denominator of an optimizer step, from the sampled tokens of each row [N].

    `num_sampled` covers all ranks; `max_tokens` is the maximum length of a row.
    """
    if aggregation == "token_mean":
        return int(num_sampled.sum())
    num_sequences = int((num_sampled > 0).sum())
    return num_sequences * max_tokens if aggregation == "constant" else num_sequences


def _call_loss_function(inputs: LossInputs, path: str) -> Tensor:
    """Return the losses [N, T] that the user's function computes.

    The function is called with logprobs, old_logprobs, advantages and mask, [N, T] each. Only
    logprobs have a gradient, and values outside the mask are 0.

    Raises:
        ConfigError: the function fails, or does not return an [N, T] tensor with a gradient.
    """
    mask = inputs.mask
    function = import_callable(path, LOSS_FUNCTION_FIELD)
    advantages = inputs.advantages.expand_as(mask)
    try:
        losses: object = function(inputs.logprobs, inputs.old_logprobs, advantages, mask)
    except Exception as error:  # user code
        raise ConfigError(
            f"{LOSS_FUNCTION_FIELD} = '{path}' raised {type(error).__name__}: {error}; it must be "
            "a function of logprobs, old_logprobs, advantages and mask that returns the loss of "
            "each token"
        ) from error
    if not isinstance(losses, Tensor) or losses.shape != mask.shape:
        description = (
            f"a tensor of shape {list(losses.shape)}"
            if isinstance(losses, Tensor)
            else f"{losses!r:.100}"
        )
        raise ConfigError(
            f"{LOSS_FUNCTION_FIELD} = '{path}' must return a tensor of shape {list(mask.shape)}, "
            f"got {description}; return the loss of each token, without taking a mean"
        )
    if inputs.logprobs.requires_grad and not losses.requires_grad:
        raise ConfigError(
            f"{LOSS_FUNCTION_FIELD} = '{path}' returned losses that do not depend on logprobs, so "
            "nothing would be learned; do not detach them"
        )
    return losses


def _row_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(-1)


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return _row_sum(values, mask) / mask.sum(-1).clamp(min=1)
