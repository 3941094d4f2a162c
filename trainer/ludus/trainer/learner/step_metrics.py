"""Metrics of a training step, summed over micro-batches and ranks, and FLOPs for the MFU.

Model FLOPs utilization counts only the work that training needs. Recomputed activations, reference
models and padding do not count.

    weights     6 per token and trained weight that takes part in a matrix product: 2 forward,
                4 backward; 4 if the weight is frozen, because it has no gradient
    attention   6 * layers * heads * head size per token and token of its sequence, half of the
                12 * L * H * Q of a full square, because the mask is causal

Source: Chowdhery et al., PaLM (2022), appendix B.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ludus.trainer.algorithms.advantages import moments, variance
from ludus.trainer.algorithms.losses import LossTerms
from ludus.trainer.core.types import Coefficients
from ludus.trainer.learner.algorithm import LossTargets, MicroBatchLoss
from ludus.trainer.learner.micro_batches import MicroBatch

_NUM_TERMS = len(fields(LossTerms))
_NUM_MOMENTS = 3
_TERA = 1e12
_GPU_PEAKS = (
    ("B200", 2250, 75),
    ("H200", 989, 67),
    ("H100 NVL", 835, 60),
    ("H100 PCIe", 756, 51),
    ("H100", 989, 67),
    ("A100", 312, 19.5),
    ("L40S", 362, 91.6),
    ("L40", 181, 90.5),
    ("L4", 121, 30.3),
    ("RTX 4090", 165, 82.6),
)
"""Part of a GPU's name, and dense TFLOP/s in bfloat16 and float32, from the data sheet."""
_CPU_MATRIX_SIZE = 768
_CPU_REPEATS = 5


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of a training step, over all minibatches and ranks."""

    loss: float
    """Mean policy loss of the minibatches. If an update was skipped, this and other values may be
    infinite or NaN."""
    grad_norm: float | None
    """Mean gradient norm of the applied updates; None if all updates were skipped."""
    learning_rate: float
    entropy_coef: float
    """Coefficient of the entropy bonus."""
    entropy: float
    clip_ratio: float
    """Share of sampled tokens whose ratio was clipped."""
    mismatch_kl: float
    """Mean per sampled token of k3, the estimated divergence of the sampler from the learner."""
    reference_kl: float
    masked_sequence_ratio: float
    """Share of samples whose tokens were all removed by the correction or the geometric mask."""
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
    """Floating-point operations that the step needed."""
    peak_flops: float | None = None
    """Peak FLOP/s of all ranks together; None if unknown."""
    num_skipped_updates: int = 0
    """Number of updates that were skipped because their gradient was not finite."""
    num_skipped_in_a_row: int = 0
    """Number of updates skipped since the last applied update, including earlier steps."""


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """FLOPs that training needs for each token, and the peak rate of the devices."""

    per_token: float
    """FLOPs per token in matrix products with weights."""
    per_token_of_sequence: float
    """FLOPs of attention for each pair of tokens of a sequence."""
    peak_flops: float | None
    """Peak FLOP/s of all devices together; None if unknown."""

    @classmethod
    def for_models(
        cls,
        models: Sequence[PreTrainedModel],
        device: torch.device,
        dtype: torch.dtype,
        num_devices: int,
    ) -> TrainingWork:
        """Return the work per token of all models together, for `num_devices` equal devices."""
        peak = measure_peak_flops(device, dtype)
        return cls(
            per_token=sum(map(_count_weight_flops, models)),
            per_token_of_sequence=sum(map(_count_attention_flops, models)),
            peak_flops=None if peak is None else peak * num_devices,
        )

    def compute_flops(self, lengths: Iterable[int], num_tokens: int) -> float:
        """Return the FLOPs of one update on sequences of these lengths.

        `num_tokens` is the number of tokens that the model computed. It is smaller than the sum of
        the lengths if sequences share prefixes, and larger if they are padded.
        """
        lengths = list(lengths)
        if not lengths:
            return 0.0
        # Mean length of a token's sequence: long sequences have more tokens.
        mean_length = sum(length * length for length in lengths) / sum(lengths)
        flops_per_token = self.per_token + self.per_token_of_sequence * mean_length
        return min(num_tokens, sum(lengths)) * flops_per_token


def sum_metrics(loss: MicroBatchLoss, targets: LossTargets, micro_batch: MicroBatch) -> Tensor:
    """Return a micro-batch's sums as one float64 vector; vectors of micro-batches can be added.

    The vector contains the loss terms, the critic's loss, the moments of the critic's targets and
    of its errors, and the number of computed tokens.
    """
    terms = [getattr(loss.terms, field.name).detach() for field in fields(LossTerms)]
    mask, critic = micro_batch.mask, targets.critic
    zeros = torch.zeros(_NUM_MOMENTS, dtype=torch.float64, device=mask.device)
    terms.append(zeros[0] if loss.critic_loss is None else loss.critic_loss.detach())
    return_moments = error_moments = zeros
    if critic is not None:
        return_moments = moments(critic.returns, mask)
        error_moments = moments(critic.returns - critic.old_values, mask)
    loss_sums = torch.stack([term.double() for term in terms])
    num_tokens = torch.full_like(zeros[:1], micro_batch.rows.num_tokens)
    return torch.cat([loss_sums, return_moments, error_moments, num_tokens])


def make_step_metrics(
    micro_batch_sums: Sequence[Tensor],
    grad_norms: Sequence[float | None],
    coefficients: Coefficients,
    lengths: Sequence[int],
    work: TrainingWork,
) -> StepMetrics:
    """Return the metrics of a step from the sums of its micro-batches; a collective.

    Args:
        grad_norms: gradient norm of each update, None for skipped updates.
        lengths: number of tokens of each sample, repeated for each pass over the batch.
    """
    summed_metrics = torch.stack(list(micro_batch_sums)).sum(0)
    dist.all_reduce(summed_metrics)
    term_sums, value_loss, return_moments, error_moments, num_forwarded = (
        summed_metrics.cpu().split([_NUM_TERMS, 1, _NUM_MOMENTS, _NUM_MOMENTS, 1])
    )
    terms, num_tokens_forwarded = LossTerms(*term_sums.unbind()), int(num_forwarded)
    num_tokens, num_updates = max(float(terms.num_tokens), 1.0), len(grad_norms)
    applied_norms = [norm for norm in grad_norms if norm is not None]
    has_critic = float(return_moments[0]) > 0
    return_variance, explained_variance = float(variance(return_moments)), None
    if return_variance > 0:
        explained_variance = 1 - float(variance(error_moments)) / return_variance
    return StepMetrics(
        loss=float(terms.loss) / num_updates,
        grad_norm=float(np.mean(applied_norms)) if applied_norms else None,
        learning_rate=coefficients.learning_rate,
        entropy_coef=coefficients.entropy,
        entropy=float(terms.entropy_sum) / num_tokens,
        clip_ratio=float(terms.num_clipped_tokens) / num_tokens,
        mismatch_kl=float(terms.mismatch_kl_sum) / num_tokens,
        reference_kl=float(terms.ref_kl_sum) / num_tokens,
        masked_sequence_ratio=float(terms.num_masked_sequences) / max(len(lengths), 1),
        masked_token_ratio=float(terms.num_masked_tokens) / num_tokens,
        value_loss=float(value_loss) / num_updates if has_critic else None,
        explained_variance=explained_variance,
        num_tokens_trained=int(terms.num_tokens),
        num_tokens_in_batch=sum(lengths),
        num_tokens_forwarded=num_tokens_forwarded,
        flops=work.compute_flops(lengths, num_tokens_forwarded),
        peak_flops=work.peak_flops,
        num_skipped_updates=num_updates - len(applied_norms),
    )


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device; None for a GPU that is not in the table.

    A CPU's peak is measured with a matrix product, on the threads that this process may use,
    because data sheets do not give a comparable number.
    """
    if device.type == "cpu":
        return _measure_cpu(dtype)
    return find_gpu_peak_flops(torch.cuda.get_device_name(device), dtype)


def find_gpu_peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a GPU by its name; None if it is not in the table."""
    for name_part, bfloat16, float32 in _GPU_PEAKS:
        if name_part in device_name:
            return (bfloat16 if dtype is torch.bfloat16 else float32) * _TERA
    return None


def _count_weight_flops(model: PreTrainedModel) -> float:
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    weights = list(model.parameters())
    if head is None or head.weight is not table:
        # The embedding table is only looked up.
        weights = [weight for weight in weights if weight is not table]
    return float(sum((6 if weight.requires_grad else 4) * weight.numel() for weight in weights))


def _count_attention_flops(model: PreTrainedModel) -> float:
    config = model.config.get_text_config()
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return 6.0 * config.num_hidden_layers * num_heads * head_size


def _measure_cpu(dtype: torch.dtype) -> float:
    matrix = torch.ones(_CPU_MATRIX_SIZE, _CPU_MATRIX_SIZE, dtype=dtype)
    durations_s = []
    for _ in range(_CPU_REPEATS):
        start_s = time.perf_counter()
        torch.mm(matrix, matrix)
        durations_s.append(time.perf_counter() - start_s)
    # The shortest time, because other processes may use the cores.
    return 2 * _CPU_MATRIX_SIZE**3 / min(durations_s)
