"""The step from a loss per token to one number that does not depend on how rows are split.

The denominator belongs to the whole optimizer step: all ranks and all micro-batches. Each
micro-batch divides its own sum by it, and the results add up. (A data-parallel wrapper that
averages gradients over ranks must be undone: multiply the loss by the number of ranks.)

Shapes: N = sequences, T = token positions. Masks are bool [N, T], True = sampled by the policy.
A row without sampled tokens is padding and does not count.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def aggregate(
    per_token_loss: Tensor, mask: Tensor, aggregation: Aggregation, denominator: float
) -> Tensor:
    """Return the share, a scalar, that these rows have in the loss of the step.

    token_mean      sum of all tokens / tokens of the step              (DAPO, arXiv 2503.14476)
    sequence_mean   sum of each row's token mean / rows of the step     (GRPO, arXiv 2402.03300)
    constant        sum of all tokens / (rows of the step * max_tokens) (arXiv 2503.20783)
    """
    if not denominator > 0:
        raise ValueError(
            f"denominator must be positive, got {denominator}; "
            "skip an optimizer step without sampled tokens"
        )
    row_sums = torch.where(mask, per_token_loss, 0.0).sum(-1)
    if aggregation == "sequence_mean":
        row_sums = row_sums / mask.sum(-1).clamp(min=1)
    return row_sums.sum() / denominator


def loss_denominator(num_sampled: Tensor, aggregation: Aggregation, max_tokens: int) -> int:
    """Return the denominator of the losses of an optimizer step.

    Args:
        num_sampled: [N] sampled tokens of all rows of the step, on all ranks.
        aggregation: see `aggregate`.
        max_tokens: maximum length of a row.
    """
    if aggregation == "token_mean":
        return int(num_sampled.sum())
    num_sequences = int((num_sampled > 0).sum())
    return num_sequences * max_tokens if aggregation == "constant" else num_sequences
