"""Rows of tokens of many lengths as batches: little padding, bounded memory.

rows --sorted by length within pools--> batches of a step --within a budget--> micro-batches
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Padded(NamedTuple):
    """Rows side by side."""

    token_ids: Tensor
    """int64 [N, T], padded on the right."""
    lengths: Tensor
    """int64 [N]"""


def pad(rows: Sequence[Sequence[int] | np.ndarray]) -> Padded:
    """The rows side by side; what pads them is never looked at."""
    lengths = torch.tensor([len(row) for row in rows])
    token_ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for row, target in zip(rows, token_ids, strict=True):
        target[: len(row)] = torch.as_tensor(row)
    return Padded(token_ids, lengths)


def within_budget(
    lengths: Sequence[int], max_tokens: int, rows_each: int = 1
) -> Iterator[list[int]]:
    """The places of items, in order, in parts that take at most `max_tokens` when padded.

    An item that takes more is a part of its own.

    Args:
        lengths: of each item's longest row.
        rows_each: rows of an item.
    """
    part: list[int] = []
    longest = 0
    for place, length in enumerate(lengths):
        grown = max(longest, length)
        if part and grown * rows_each * (len(part) + 1) > max_tokens:
            yield part
            part, grown = [], length
        part.append(place)
        longest = grown
    if part:
        yield part
