"""Left-padded rows, as Forge's `Episode.request_tensor` builds them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LeftPaddedRows(NamedTuple):
    """Token rows [B, S] with the model inputs that make padding irrelevant."""

    token_ids: Tensor
    attention_mask: Tensor
    """int64 [B, S]: 0 for padding on the left, otherwise 1."""
    position_ids: Tensor
    """int64 [B, S]: 0 at the first real token of each row."""


def make_rows(token_ids: Tensor, pad_id: int | None) -> LeftPaddedRows:
    """Build the model inputs; padding on the right needs no mask in a causal model."""
    is_padding = token_ids == pad_id if pad_id is not None else torch.zeros_like(token_ids).bool()
    num_left = is_padding.long().cumprod(1).sum(1, keepdim=True)
    indices = torch.arange(token_ids.shape[1], device=token_ids.device)
    return LeftPaddedRows(
        token_ids, (indices >= num_left).long(), (indices - num_left).clamp(min=0)
    )
