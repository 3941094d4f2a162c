"""What a training step did: sums over its micro-batches and over all ranks, in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ludus.trainer.algorithms.moments import moments, variance
from ludus.trainer.algorithms.policy_loss import LossTerms
from ludus.trainer.core.types import Batch, Coefficients
from ludus.trainer.learner.algorithm import CriticTargets, Loss
from ludus.trainer.learner.micro_batches import MicroBatch
from ludus.trainer.models.flops import TrainingWork

_NUM_TERMS = len(fields(LossTerms))
_NUM_MOMENTS = 3


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What a training step did, over all its minibatches and ranks."""

    loss: float
    """Of the policy, mean over the minibatches. It, and what follows from the same numbers, is
    not finite where an update was skipped because they are not."""
    grad_norm: float | None
    """Mean over the updates that were taken; None where none was."""
    learning_rate: float
    entropy: float
    clip_ratio: float
    """Share of sampled tokens at which the clip held."""
    mismatch_kl: float
    """k3 of sampler from learner, mean per sampled token."""
    reference_kl: float
    masked_sequence_ratio: float
    """Share of samples of which correction or geometric mask left out every token."""
    masked_token_ratio: float
    """Share of sampled tokens that they left out."""
    value_loss: float | None
    """Of the critic, mean over the minibatches; None without one."""
    explained_variance: float | None
    """1 - var(returns - values) / var(returns), before the step: 1 is a critic that knows, 0 one
    that knows nothing; None without one, or where all returns are equal."""
    num_tokens_trained: int
    """Sampled tokens in the loss."""
    num_tokens_in_batch: int
    """Tokens of all samples, prompts included: what would be computed if nothing were shared."""
    num_tokens_forwarded: int
    """Tokens the model computed for it, padding included."""
    flops: float = 0.0
    """Floating-point work that the step needed; see models/flops.py."""
    peak_flops: float | None = None
    """FLOP/s that all ranks together could do; None where that is not known."""
    num_skipped_updates: int = 0
    """Minibatches whose gradient was not finite: they have moved nothing."""
    num_skipped_in_a_row: int = 0
    """Such minibatches since the last update, also of the steps before."""


@dataclass(frozen=True, slots=True)
class MicroBatchSums:
    """What one micro-batch adds to the metrics of its step."""

    loss: Loss
    critic: CriticTargets | None
    micro_batch: MicroBatch

    def flat(self) -> Tensor:
        """All sums in a row, in float64: they add up over micro-batches and ranks."""
        terms = [getattr(self.loss.terms, field.name).detach() for field in fields(LossTerms)]
        device = self.micro_batch.mask.device
        nothing = torch.zeros(_NUM_MOMENTS, dtype=torch.float64, device=device)
        value_loss = nothing[:1] if self.loss.value is None else self.loss.value.detach()[None]
        returned = missed = nothing
        if self.critic is not None:
            returned = moments(self.critic.returns, self.micro_batch.mask)
            missed = moments(self.critic.returns - self.critic.old_values, self.micro_batch.mask)
        return torch.cat(
            [
                torch.stack([term.double() for term in terms]),
                value_loss.double(),
                returned,
                missed,
                torch.tensor([float(self.micro_batch.rows.num_tokens)], device=device).double(),
            ]
        )


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The sums of a whole step, on the CPU."""

    terms: LossTerms
    value_loss: float
    returned: Tensor
    """[3] moments of the returns."""
    missed: Tensor
    """[3] moments of what the critic's values lacked."""
    num_tokens_forwarded: int

    @classmethod
    def of(cls, parts: Sequence[MicroBatchSums]) -> StepTotals:
        """The sums over these micro-batches and all ranks; a collective."""
        total = torch.stack([sums.flat() for sums in parts]).sum(0)
        dist.all_reduce(total)
        terms, value_loss, returned, missed, num_tokens = total.cpu().split(
            [_NUM_TERMS, 1, _NUM_MOMENTS, _NUM_MOMENTS, 1]
        )
        return cls(LossTerms(*terms.unbind()), float(value_loss), returned, missed, int(num_tokens))

    @property
    def explained_variance(self) -> float | None:
        """See StepMetrics."""
        spread = float(variance(self.returned))
        return 1 - float(variance(self.missed)) / spread if spread > 0 else None


@dataclass(frozen=True, slots=True)
class PassedBatch:
    """A batch, and how often the step has passed over it."""

    batch: Batch
    num_passes: int

    @property
    def lengths(self) -> list[int]:
        """Of all samples of all passes."""
        batch = self.batch
        once: list[int] = batch.sequences.lengths[batch.sequence_of_sample].tolist()
        return once * self.num_passes


def step_metrics(
    totals: StepTotals,
    grad_norms: Sequence[float | None],
    coefficients: Coefficients,
    passed: PassedBatch,
    work: TrainingWork,
) -> StepMetrics:
    """The metrics of a step of these sums, with `grad_norms` of its updates, None where skipped."""
    terms = totals.terms
    num_tokens, num_updates = max(float(terms.num_tokens), 1.0), len(grad_norms)
    norms = [norm for norm in grad_norms if norm is not None]
    has_critic = float(totals.returned[0]) > 0
    lengths = passed.lengths
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
