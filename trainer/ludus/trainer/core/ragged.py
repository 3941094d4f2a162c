"""Rows of different lengths in one array, so that thousands of rows are sent as two buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike


@dataclass(frozen=True, slots=True, eq=False)
class RaggedArray:
    """A sequence of one-dimensional arrays, each of which is a view of `values`."""

    values: np.ndarray
    """[sum of all lengths] concatenation of all rows."""
    ends: np.ndarray
    """int64 [R] index after the last value of each row."""

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any] | np.ndarray], dtype: DTypeLike) -> RaggedArray:
        """Build a RaggedArray from rows, converted to `dtype`."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
        return cls(values, np.cumsum([len(array) for array in arrays], dtype=np.int64))

    @property
    def lengths(self) -> np.ndarray:
        """int64 [R] number of values in each row."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        """Return the number of rows, R."""
        return len(self.ends)

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, row: int) -> np.ndarray:
        start = self.ends[row - 1] if row else 0
        return self.values[start : self.ends[row]]

    def concatenate_rows(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the values of these rows, concatenated."""
        if len(rows) == 0:
            return self.values[:0]
        return np.concatenate([self[row] for row in rows])

    def to_bytes(self) -> tuple[bytes, bytes]:
        """Return the bytes of `values` and `ends`, which are equal for equal arrays."""
        return self.values.tobytes(), self.ends.tobytes()


def join_rows(arrays: Sequence[RaggedArray | None]) -> RaggedArray | None:
    """Return the rows of all arrays as one array, or None if all of them are None.

    Raises:
        ValueError: some of the arrays are None, and others are not.
    """
    present_arrays = [array for array in arrays if array is not None]
    if not present_arrays:
        return None
    if len(present_arrays) < len(arrays):
        raise ValueError(
            f"{len(present_arrays)} of {len(arrays)} token sequences are restricted to legal "
            "answers; either all or none of them must be"
        )
    values = np.concatenate([array.values for array in present_arrays])
    lengths = np.concatenate([array.lengths for array in present_arrays])
    return RaggedArray(values, np.cumsum(lengths, dtype=np.int64))
