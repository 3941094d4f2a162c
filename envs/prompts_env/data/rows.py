"""Rows: what every data set is read as, whatever it lies in.

    data.jsonl .ndjson .csv   the file stays where it is; only where each row begins is kept
    data.json                 read into memory
    data.parquet              read into memory            (pyarrow)
    a folder                  a Hugging Face data set that save_to_disk wrote, mapped (pyarrow)

A row is a JSON object. All rows have the same columns: those that any of them has, null where a
row lacks one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import orjson

from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError

RowCheck = Callable[[JsonObject], None]
"""Raises ValueError, with what is wrong, of a row that nothing can be asked with."""

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".csv")
SUFFIXES = (*TEXT_SUFFIXES, ".json", ".parquet")


class Rows(Protocol):
    """The rows of one data set; several threads may read them at once."""

    @property
    def columns(self) -> tuple[str, ...]:
        """In the order in which they first appear."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> JsonObject:
        """Row `index`, from 0: every column's value; the caller may keep and change it."""


class ListedRows:
    """Rows that are in memory."""

    def __init__(self, rows: Sequence[JsonObject]) -> None:
        self._rows = rows
        self._columns = tuple(dict.fromkeys(name for row in rows for name in row))

    @property
    def columns(self) -> tuple[str, ...]:
        """In the order in which they first appear."""
        return self._columns

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> JsonObject:
        row = self._rows[index]
        return {name: row.get(name) for name in self._columns}


def open_rows(path: Path, split: str | None, check: RowCheck) -> Rows:
    """The rows of a file or folder, each of which passes `check`.

    Args:
        split: of a folder that holds several, such as "train"; None where it holds one.

    Raises:
        ConfigError: there is no data set at `path`, it has no rows, or one of them is faulty: the
            message names its number, from 1.
    """
    if not path.exists():
        raise ConfigError(
            f"path = '{path}': no data there; expected a file ({', '.join(SUFFIXES)}) or a folder "
            "that save_to_disk of Hugging Face's datasets wrote"
        )
    if path.is_dir() or path.suffix == ".parquet":
        from .arrow import open_arrow  # pyarrow is an extra

        rows: Rows = open_arrow(path, split, check)
    elif path.suffix in TEXT_SUFFIXES:
        from .text import CsvRows, JsonLinesRows

        rows = (CsvRows if path.suffix == ".csv" else JsonLinesRows)(path, check)
    elif path.suffix == ".json":
        rows = _read_json(path, check)
    else:
        raise ConfigError(
            f"path = '{path}': expected a name that ends with one of {', '.join(SUFFIXES)}, got "
            f"'{path.suffix}'; rename it, or write it with prompts_env.write_rows"
        )
    if not len(rows):
        raise ConfigError(f"path = '{path}': expected at least one row, got none")
    return rows


def faulty(path: Path, number: int, reason: object) -> ConfigError:
    """The error for row `number`, from 0, of a data set."""
    return ConfigError(f"path = '{path}', row {number + 1}: {reason}; mend or remove that row")


def _read_json(path: Path, check: RowCheck) -> ListedRows:
    try:
        found = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"path = '{path}': expected JSON, {error.msg} at line {error.lineno}; one object per "
            "line is called .jsonl"
        ) from None
    if isinstance(found, dict):
        found = _rows_of_columns(path, found)
    if not isinstance(found, list):
        raise ConfigError(
            f"path = '{path}': expected a list of objects, or an object of columns, got "
            f"{type(found).__name__}"
        )
    for number, row in enumerate(found):
        if not isinstance(row, dict):
            raise faulty(path, number, f"expected an object, got {type(row).__name__}")
        check_row(path, number, row, check)
    return ListedRows(found)


def check_row(path: Path, number: int, row: JsonObject, check: RowCheck) -> None:
    """Refuse a row that does not pass.

    Raises:
        ConfigError: with its number.
    """
    try:
        check(row)
    except ValueError as error:
        raise faulty(path, number, error) from None


def rows_of_columns(columns: dict[str, list[object]]) -> list[JsonObject]:
    """Columns of equal length, {"prompt": [...]}, as rows.

    Raises:
        ValueError: their lengths differ.
    """
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"expected columns of one length, got {lengths}")
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _rows_of_columns(path: Path, found: JsonObject) -> list[JsonObject]:
    others = sorted(name for name, values in found.items() if not isinstance(values, list))
    if others:
        raise ConfigError(
            f"path = '{path}': expected a list of objects, or an object whose values are columns, "
            f"got an object whose '{others[0]}' is no list"
        )
    try:
        return rows_of_columns(found)
    except ValueError as error:
        raise ConfigError(f"path = '{path}': {error}") from None
