"""From a loss per token to one number, the same however the rows are spread.

The denominator belongs to the whole optimizer step: all ranks and all micro-batches. Each part
divides its own sum by it, and the parts add up. (A data-parallel wrapper that averages
gradients over ranks must be undone: multiply the loss by the number of ranks.)

Shapes: N = sequences, T = token positions. Masks are bool [N, T], True = sampled by the policy.
A row without tokens is padding and counts for nothing.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def aggregate(per_token_loss: Tensor, mask: Tensor, how: Aggregation, denominator: float) -> Tensor:
    """This part's share, a scalar, of the step's loss.

    token_mean      sum of all tokens / tokens of the step              (DAPO, arXiv 2503.14476)
    sequence_mean   sum of each row's token mean / rows of the step     (GRPO, arXiv 2402.03300)
    constant        sum of all tokens / (rows of the step * max_tokens) (arXiv 2503.20783)
    """
    if not denominator > 0:
        raise ValueError(
            f"denominator expected a positive number, got {denominator}; "
            "skip an optimizer step that has no sampled token"
        )
    row_sums = torch.where(mask, per_token_loss, 0.0).sum(-1)
    if how == "sequence_mean":
        row_sums = row_sums / mask.sum(-1).clamp(min=1)
    return row_sums.sum() / denominator


def loss_denominator(mask: Tensor, how: Aggregation, max_tokens: int | None = None) -> int:
    """What these rows add to the step's denominator; sum it over micro-batches and ranks.

    "constant" needs `max_tokens`, the longest that a row may get.
    """
    if how == "token_mean":
        return int(mask.sum())
    num_sequences = int(mask.any(-1).sum())
    if how == "sequence_mean":
        return num_sequences
    if max_tokens is None:
        raise ValueError(
            "max_tokens expected a number for how = 'constant', got None; "
            "pass the token limit of a sequence"
        )
    return num_sequences * max_tokens
