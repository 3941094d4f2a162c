"""Keys and values of many sequences of different lengths, in one tensor for all layers.

    columns    0 ....................... num_columns
    row 0      . . . . k k k k k k k k k            start 4: four unused columns
    row 1      k k k k k k k k k k k k k            start 0
    row 2      . . k k k k k k k k k k k            start 2

All sequences end in the same column, so a token is appended to all of them by writing one column,
and a row is removed by moving the last row to its place. Nothing is copied for the other rows.
Memory for more rows can be allocated, so that a row is copied when its sequence branches.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

MAX_COPIED_ROWS = 32
"""Maximum number of rows that are copied at once, because the copy needs memory, too."""


@dataclass(frozen=True, slots=True)
class KeyValueShape:
    """Sizes of a model's keys and values, which are the same in all of its layers."""

    num_layers: int
    num_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Size of the keys and values of a token."""
        return 2 * self.num_layers * self.num_heads * self.head_size * self.dtype.itemsize

    def allocate(self, num_rows: int, num_columns: int) -> Tensor:
        """Return [2, layers, rows, heads, columns, head size] with arbitrary values."""
        sizes = (2, self.num_layers, num_rows, self.num_heads, num_columns, self.head_size)
        return torch.empty(sizes, dtype=self.dtype, device=self.device)


class KeyValueRows(Cache):
    """Keys and values of sequences, a row each, which a model reads and extends."""

    def __init__(
        self,
        shape: KeyValueShape,
        starts: Sequence[int],
        num_columns: int,
        capacity: int,
        max_rows: int = 0,
    ):
        """Allocate columns for sequences that end in column `num_columns`.

        Args:
            shape: sizes of the model's keys and values.
            starts: [rows] first column of each sequence.
            num_columns: number of columns that are in use.
            capacity: number of columns that can be used.
            max_rows: number of rows that can be used, if it is more than `starts` has.
        """
        self.values = shape.allocate(max(max_rows, len(starts)), capacity)
        self.starts = list(starts)
        self.num_columns = num_columns
        # Unused columns get no weight, but the product of zero and NaN is NaN.
        if max(starts, default=0) > 0:
            self.values[:, :, : len(starts), :, : max(starts)] = 0
        super().__init__(layers=[_Layer(self, index) for index in range(shape.num_layers)])

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return len(self.starts)

    @property
    def capacity(self) -> int:
        """Number of columns that can be used without another allocation."""
        return self.values.shape[-2]

    @property
    def max_length(self) -> int:
        """Length of the longest sequence."""
        return self.num_columns - min(self.starts, default=self.num_columns)

    def advance(self, num_columns: int) -> None:
        """Count the columns that the model has just appended."""
        self.num_columns += num_columns

    def read_rows(self, rows: Sequence[int]) -> Tensor:
        """Return a copy of these rows, up to the last column in use."""
        row_tensor = torch.tensor(rows, device=self.values.device)
        return self.values[:, :, :, :, : self.num_columns].index_select(2, row_tensor)

    def write_rows(self, first_row: int, source: Tensor) -> None:
        """Copy rows whose sequences end in the last column of `source`."""
        num_rows, num_columns = source.shape[2], min(source.shape[-2], self.num_columns)
        target = self.values[:, :, first_row : first_row + num_rows]
        columns = slice(self.num_columns - num_columns, self.num_columns)
        target[..., columns, :] = source[..., source.shape[-2] - num_columns :, :]

    def copy_rows(self, rows: Sequence[int]) -> None:
        """Append a copy of each of these rows."""
        for first in range(0, len(rows), MAX_COPIED_ROWS):
            sources = rows[first : first + MAX_COPIED_ROWS]
            num_rows = self.num_rows
            targets = self.values[:, :, num_rows : num_rows + len(sources), :, : self.num_columns]
            targets.copy_(self.read_rows(sources))
            self.starts += [self.starts[row] for row in sources]

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Remove all other rows; return the old number of each row in the new order."""
        num_kept = len(rows)
        free_rows = sorted(set(range(num_kept)).difference(rows))
        moved_rows = [row for row in rows if row >= num_kept]
        order = list(range(num_kept))
        for target, source in zip(free_rows, moved_rows, strict=True):
            order[target] = source
        if moved_rows:
            used = self.values[:, :, :, :, : self.num_columns]
            used[:, :, free_rows] = used[:, :, moved_rows]
        self.starts = [self.starts[row] for row in order]
        return order


class _Layer(CacheLayerMixin):
    """The keys and values of one layer, as transformers reads and extends them."""

    is_sliding = False

    def __init__(self, rows: KeyValueRows, index: int) -> None:
        super().__init__()
        # A weak reference, so that the memory is free as soon as the rows are not needed.
        self._rows = weakref.proxy(rows)
        self._index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the columns are allocated."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns, and return the keys and values of all columns."""
        rows = self._rows
        start, end = rows.num_columns, rows.num_columns + key_states.shape[-2]
        layer = rows.values[:, self._index, : rows.num_rows]
        layer[0, :, :, start:end] = key_states
        layer[1, :, :, start:end] = value_states
        return layer[0, :, :, :end], layer[1, :, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns with the query's columns, and the first column."""
        return self._rows.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of columns in use."""
        return self._rows.num_columns

    def get_max_length(self) -> int:
        """Return -1, because there is no fixed limit."""
        return -1
