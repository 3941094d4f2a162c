"""Rows, the common form of all data sets.

A row is a JSON object. All rows of a data set have the same columns, which are the columns of any
row. A row without a column has null there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError

RowCheck = Callable[[JsonObject], None]
"""Function that raises ValueError if a row cannot be used, with the reason."""


class Rows(Protocol):
    """The rows of one data set. Several threads may read them."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, in the order of their first appearance."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> JsonObject:
        """Return a copy of row `index`, with a value for every column."""


class ListedRows:
    """Rows in memory."""

    def __init__(self, rows: Sequence[JsonObject]) -> None:
        self._rows = rows
        self._columns = tuple(dict.fromkeys(name for row in rows for name in row))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, in the order of their first appearance."""
        return self._columns

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> JsonObject:
        row = self._rows[index]
        return {name: row.get(name) for name in self._columns}


def check_row(path: Path, index: int, row: JsonObject, check: RowCheck) -> None:
    """Refuse a row that does not pass the check.

    Raises:
        ConfigError: The row is invalid; the message has its number.
    """
    try:
        check(row)
    except ValueError as error:
        raise make_row_error(path, index, error) from None


def make_row_error(path: Path, index: int, reason: object) -> ConfigError:
    """Return the error for an invalid row."""
    return ConfigError(f"path = '{path}', row {index + 1}: {reason}; fix or remove the row")


def split_columns(columns: dict[str, list[object]]) -> list[JsonObject]:
    """Return the rows of a table that is given as columns of equal length.

    Raises:
        ValueError: The columns have different lengths.
    """
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns must have the same length, got {lengths}")
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]
