"""Floating-point work of training a model, and what the device could do: both halves of MFU.

Model FLOPs utilisation counts the work that training needs, whatever is done beside it:
recomputed activations, reference models and padding are not work.

    weights     6 per token and trained weight that takes part in a matrix product: 2 forward,
                4 backward; 4 where the weight is frozen, since it has no gradient of its own
    attention   6 * layers * heads * head size per token and token of its sequence, half of the
                12 * L * H * Q of a full square: the mask is causal

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
"""Part of a GPU's name, and dense TFLOP/s in bfloat16 and float32, from its maker's data sheet."""
_CPU_MATRIX = 768
_CPU_TRIES = 5


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """What training a model takes for each token, and what there is to do it."""

    per_token: float
    """FLOPs in the weights' matrix products."""
    per_token_of_sequence: float
    """FLOPs in attention, for each token of the sequence it stands in."""
    peak_flops: float | None
    """FLOP/s of all devices at best; None where that is not known."""

    @classmethod
    def of(
        cls,
        models: Sequence[PreTrainedModel],
        device: torch.device,
        dtype: torch.dtype,
        num_devices: int,
    ) -> TrainingWork:
        """The work of one token in all models, by weights and shape, on devices like this one."""
        peak = peak_flops(device, dtype)
        work = [cls._of_one(model) for model in models]
        return cls(
            per_token=sum(per_token for per_token, _ in work),
            per_token_of_sequence=sum(of_sequence for _, of_sequence in work),
            peak_flops=None if peak is None else peak * num_devices,
        )

    @staticmethod
    def _of_one(model: PreTrainedModel) -> tuple[float, float]:
        config = model.config.get_text_config()
        num_heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        # The table of embeddings is looked up; as the head it is multiplied, when they are one.
        table = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        is_looked_up = head is None or head.weight is not table
        weights = [p for p in model.parameters() if not (is_looked_up and p is table)]
        return (
            float(sum((6 if p.requires_grad else 4) * p.numel() for p in weights)),
            6.0 * config.num_hidden_layers * num_heads * head_size,
        )

    def flops(self, lengths: Iterable[int], num_tokens: int) -> float:
        """FLOPs of one update.

        Args:
            lengths: of the sequences that were trained on.
            num_tokens: that the model computed for them: fewer than the lengths add up to where
                sequences shared what they have in common, more where they were padded.
        """
        lengths = list(lengths)
        num_in_all = sum(lengths)
        if not num_in_all:
            return 0.0
        # Of the sequence in which a token stands, on average: long ones have more tokens.
        mean_length = sum(length * length for length in lengths) / num_in_all
        per_token = self.per_token + self.per_token_of_sequence * mean_length
        return min(num_tokens, num_in_all) * per_token


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that one device can do at best; None for a GPU that the table does not know.

    A CPU has no data sheet that counts: it is measured by a matrix product, with the threads
    that this process may use.
    """
    if device.type == "cpu":
        return _measured(dtype)
    return known_peak(torch.cuda.get_device_name(device), dtype)


def known_peak(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU by its name."""
    for part, bfloat16, float32 in _PEAKS:
        if part in device_name:
            return (bfloat16 if dtype is torch.bfloat16 else float32) * _TERA
    return None


def _measured(dtype: torch.dtype) -> float:
    matrix = torch.ones(_CPU_MATRIX, _CPU_MATRIX, dtype=dtype)
    durations_s = []
    for _ in range(_CPU_TRIES):
        started_s = time.perf_counter()
        torch.mm(matrix, matrix)
        durations_s.append(time.perf_counter() - started_s)
    # The best: another process may have had the cores meanwhile.
    return 2 * _CPU_MATRIX**3 / min(durations_s)
