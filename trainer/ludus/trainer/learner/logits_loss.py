"""A loss of logits that a caller of the learner brings along."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class LogitsLoss(NamedTuple):
    """Rows of tokens, and what is learned from the policy's logits of them.

    Shapes: B = rows, S = tokens of a row, V = vocabulary.
    """

    token_ids: Tensor
    """int64 [B, S]"""
    attention_mask: Tensor
    """int64 [B, S]: 0 for what no token may look at."""
    position_ids: Tensor
    """int64 [B, S]"""
    of_logits: Callable[[Tensor], Tensor]
    """From float32 logits [B, S, V] to a scalar with a gradient."""
