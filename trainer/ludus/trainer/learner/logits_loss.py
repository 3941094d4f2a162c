"""A loss of logits that the caller of the learner supplies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class LogitsLoss(NamedTuple):
    """Rows of tokens, and a loss of the policy's logits for them.

    Shapes: B = rows, S = tokens of a row, V = vocabulary.
    """

    token_ids: Tensor
    """int64 [B, S]"""
    attention_mask: Tensor
    """int64 [B, S], 0 for tokens that no token attends to."""
    position_ids: Tensor
    """int64 [B, S]"""
    loss_function: Callable[[Tensor], Tensor]
    """Function from float32 logits [B, S, V] to a scalar with a gradient."""
