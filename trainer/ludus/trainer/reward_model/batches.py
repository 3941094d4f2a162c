"""Batches of token sequences with little padding and bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class PaddedRows(NamedTuple):
    """Token sequences in one tensor."""

    token_ids: Tensor
    """int64 [N, T], padded on the right."""
    lengths: Tensor
    """int64 [N]"""


def pad_rows(rows: Sequence[Sequence[int] | np.ndarray]) -> PaddedRows:
    """Return the rows in one tensor. The padding token is arbitrary, because it is masked."""
    lengths = torch.tensor([len(row) for row in rows])
    token_ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for row, target in zip(rows, token_ids, strict=True):
        target[: len(row)] = torch.as_tensor(row)
    return PaddedRows(token_ids, lengths)


def split_by_budget(
    lengths: Sequence[int], max_tokens: int, rows_per_item: int = 1
) -> Iterator[list[int]]:
    """Yield the indices of consecutive items in parts of at most `max_tokens` padded tokens.

    An item with more tokens is a separate part.

    Args:
        lengths: length of each item's longest row.
        rows_per_item: number of rows of an item.
    """
    part: list[int] = []
    max_length = 0
    for index, length in enumerate(lengths):
        new_max_length = max(max_length, length)
        if part and new_max_length * rows_per_item * (len(part) + 1) > max_tokens:
            yield part
            part, new_max_length = [], length
        part.append(index)
        max_length = new_max_length
    if part:
        yield part
