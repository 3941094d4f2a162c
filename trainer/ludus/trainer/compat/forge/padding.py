"""Rows that are filled up on the left, as Forge's `Episode.request_tensor` makes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Token rows [B, S] as a model takes them, so that what fills them up changes nothing."""

    token_ids: Tensor
    attention_mask: Tensor
    """int64 [B, S]: 0 where a row is filled up on its left."""
    position_ids: Tensor
    """int64 [B, S]: from 0 where the row begins."""


def rows_of(token_ids: Tensor, pad_id: int | None) -> Rows:
    """The rows. What fills them up on the right needs no mask: nothing before it sees it."""
    is_filler = token_ids == pad_id if pad_id is not None else torch.zeros_like(token_ids).bool()
    num_left = is_filler.long().cumprod(1).sum(1, keepdim=True)
    places = torch.arange(token_ids.shape[1], device=token_ids.device)
    return Rows(token_ids, (places >= num_left).long(), (places - num_left).clamp(min=0))
