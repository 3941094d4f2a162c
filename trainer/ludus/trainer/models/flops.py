"""Floating-point work of training and the peak rate of the device: the two parts of MFU.

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
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

_TERA = 1e12
_PEAKS = (
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
class TrainingWork:
    """FLOPs that training needs for each token, and the peak rate of the devices."""

    per_token: float
    """FLOPs per token in matrix products with weights."""
    per_token_of_sequence: float
    """FLOPs of attention per token and per token of the same sequence."""
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
        """Return the work per token of all models together, on devices like this one."""
        peak = peak_flops(device, dtype)
        return cls(
            per_token=sum(map(_weight_flops, models)),
            per_token_of_sequence=sum(map(_attention_flops, models)),
            peak_flops=None if peak is None else peak * num_devices,
        )

    def flops(self, lengths: Iterable[int], num_tokens: int) -> float:
        """Return the FLOPs of one update.

        Args:
            lengths: lengths of the sequences that were trained on.
            num_tokens: number of tokens that the model computed. It is smaller than the sum of the
                lengths if sequences share prefixes, and larger if they are padded.
        """
        lengths = list(lengths)
        num_sequence_tokens = sum(lengths)
        if not num_sequence_tokens:
            return 0.0
        # Mean length of a token's sequence: long sequences have more tokens.
        mean_length = sum(length * length for length in lengths) / num_sequence_tokens
        per_token = self.per_token + self.per_token_of_sequence * mean_length
        return min(num_tokens, num_sequence_tokens) * per_token


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device; None for a GPU that is not in the table.

    A CPU's peak is measured with a matrix product, on the threads that this process may use,
    because data sheets do not give a comparable number.
    """
    if device.type == "cpu":
        return _measure_cpu(dtype)
    return gpu_peak_flops(torch.cuda.get_device_name(device), dtype)


def gpu_peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a GPU by its name; None if it is not in the table."""
    for part, bfloat16, float32 in _PEAKS:
        if part in device_name:
            return (bfloat16 if dtype is torch.bfloat16 else float32) * _TERA
    return None


def _weight_flops(model: PreTrainedModel) -> float:
    # The embedding table is only looked up, unless it is also the output head.
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    is_looked_up = head is None or head.weight is not table
    weights = [p for p in model.parameters() if not (is_looked_up and p is table)]
    return float(sum((6 if p.requires_grad else 4) * p.numel() for p in weights))


def _attention_flops(model: PreTrainedModel) -> float:
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
