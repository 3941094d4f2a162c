"""Metrics of a training step: sums over micro-batches and ranks, in one reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ludus.trainer.algorithms.moments import moments, variance
from ludus.trainer.algorithms.policy_loss import LossTerms
from ludus.trainer.core.types import Coefficients
from ludus.trainer.learner.algorithm import CriticTargets, MicroBatchLoss
from ludus.trainer.learner.micro_batches import MicroBatch
from ludus.trainer.models.flops import TrainingWork

_NUM_TERMS = len(fields(LossTerms))
_NUM_MOMENTS = 3


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of a training step, over all minibatches and ranks."""

    loss: float
    """Mean policy loss of the minibatches. This and other values derived from the same numbers are
    not finite if an update was skipped because of them."""
    grad_norm: float | None
    """Mean gradient norm of the applied updates; None if all updates were skipped."""
    learning_rate: float
    entropy: float
    clip_ratio: float
    """Share of sampled tokens whose ratio was clipped."""
    mismatch_kl: float
    """Mean k3 per sampled token of the sampler from the learner."""
    reference_kl: float
    masked_sequence_ratio: float
    """Share of samples of which the correction or the geometric mask removed every token."""
    masked_token_ratio: float
    """Share of sampled tokens that the correction or the geometric mask removed."""
    value_loss: float | None
    """Mean critic loss of the minibatches; None without a critic."""
    explained_variance: float | None
    """1 - var(returns - values) / var(returns), before the step: 1 for a perfect critic, 0 for an
    untrained critic; None without a critic, or if all returns are equal."""
    num_tokens_trained: int
    """Number of sampled tokens in the loss."""
    num_tokens_in_batch: int
    """Number of tokens of all samples, including prompts: the work without shared prefixes."""
    num_tokens_forwarded: int
    """Number of tokens that the model computed, including padding."""
    flops: float = 0.0
    """Floating-point operations that the step needed; see models/flops.py."""
    peak_flops: float | None = None
    """Peak FLOP/s of all ranks together; None if unknown."""
    num_skipped_updates: int = 0
    """Number of updates that were skipped because their gradient was not finite."""
    num_skipped_in_a_row: int = 0
    """Number of updates skipped since the last applied update, including earlier steps."""


@dataclass(frozen=True, slots=True)
class MicroBatchSums:
    """One micro-batch's share of the metrics of its step."""

    loss: MicroBatchLoss
    critic: CriticTargets | None
    micro_batch: MicroBatch

    def flatten(self) -> Tensor:
        """Return all sums as one float64 vector; they add up over micro-batches and ranks."""
        terms = [getattr(self.loss.terms, field.name).detach() for field in fields(LossTerms)]
        mask = self.micro_batch.mask
        zeros = torch.zeros(_NUM_MOMENTS, dtype=torch.float64, device=mask.device)
        value_loss = zeros[:1] if self.loss.value is None else self.loss.value.detach()[None]
        returns = errors = zeros
        if self.critic is not None:
            returns = moments(self.critic.returns, mask)
            errors = moments(self.critic.returns - self.critic.old_values, mask)
        num_tokens = torch.tensor([float(self.micro_batch.rows.num_tokens)], device=mask.device)
        return torch.cat(
            [
                torch.stack([term.double() for term in terms]),
                value_loss.double(),
                returns,
                errors,
                num_tokens.double(),
            ]
        )


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums of a whole step, on the CPU."""

    terms: LossTerms
    value_loss: float
    return_moments: Tensor
    """[3] moments of the returns."""
    error_moments: Tensor
    """[3] moments of the returns minus the critic's values."""
    num_tokens_forwarded: int

    @classmethod
    def reduce(cls, sums: Sequence[MicroBatchSums]) -> StepTotals:
        """Return the totals over these micro-batches and all ranks; a collective."""
        total = torch.stack([micro_batch.flatten() for micro_batch in sums]).sum(0)
        dist.all_reduce(total)
        terms, value_loss, returns, errors, num_tokens = total.cpu().split(
            [_NUM_TERMS, 1, _NUM_MOMENTS, _NUM_MOMENTS, 1]
        )
        return cls(LossTerms(*terms.unbind()), float(value_loss), returns, errors, int(num_tokens))

    @property
    def explained_variance(self) -> float | None:
        """See StepMetrics."""
        spread = float(variance(self.return_moments))
        return 1 - float(variance(self.error_moments)) / spread if spread > 0 else None


def make_step_metrics(
    totals: StepTotals,
    grad_norms: Sequence[float | None],
    coefficients: Coefficients,
    lengths: Sequence[int],
    work: TrainingWork,
) -> StepMetrics:
    """Return the metrics of a step.

    Args:
        totals: sums of the step.
        grad_norms: gradient norm of each update, None for skipped updates.
        coefficients: coefficients of the step.
        lengths: number of tokens of each sample, repeated for each pass over the batch.
        work: FLOPs that the model needs.
    """
    terms = totals.terms
    num_tokens, num_updates = max(float(terms.num_tokens), 1.0), len(grad_norms)
    norms = [norm for norm in grad_norms if norm is not None]
    has_critic = float(totals.return_moments[0]) > 0
    return StepMetrics(
        loss=float(terms.loss) / num_updates,
        grad_norm=float(np.mean(norms)) if norms else None,
        learning_rate=coefficients.learning_rate,
        entropy=float(terms.entropy_sum) / num_tokens,
        clip_ratio=float(terms.num_clipped_tokens) / num_tokens,
        mismatch_kl=float(terms.mismatch_kl_sum) / num_tokens,
        reference_kl=float(terms.ref_kl_sum) / num_tokens,
        masked_sequence_ratio=float(terms.num_masked_sequences) / max(len(lengths), 1),
        masked_token_ratio=float(terms.num_masked_tokens) / num_tokens,
        value_loss=totals.value_loss / num_updates if has_critic else None,
        explained_variance=totals.explained_variance if has_critic else None,
        num_tokens_trained=int(terms.num_tokens),
        num_tokens_in_batch=sum(lengths),
        num_tokens_forwarded=totals.num_tokens_forwarded,
        flops=work.flops(lengths, totals.num_tokens_forwarded),
        peak_flops=work.peak_flops,
        num_skipped_updates=num_updates - len(norms),
    )
