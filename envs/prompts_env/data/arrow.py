"""Rows in Parquet files, and in the folders that Hugging Face's `datasets` saves; takes pyarrow.

    FOLDER/dataset_dict.json      {"splits": ["train", "test"]}; each split is a folder in it
    FOLDER/state.json             {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}

Arrow files of a folder are mapped: their rows take no memory. Parquet is compressed, so a file is
read whole. NaN is null, as pandas has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from ludus.env.encoding import row_without_nan
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError

from .rows import RowCheck, check_row

_STATE_FILE = "state.json"
_SPLITS_FILE = "dataset_dict.json"
_NUM_READ_AT_ONCE = 1024


class ArrowRows:
    """The rows of an Arrow table."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._columns = tuple(table.column_names)

    @property
    def columns(self) -> tuple[str, ...]:
        """In the table's order."""
        return self._columns

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> JsonObject:
        (row,) = self._table.slice(index, 1).to_pylist()
        return row_without_nan(row)


def open_arrow(path: Path, split: str | None, check: RowCheck) -> ArrowRows:
    """The rows of a Parquet file or of a saved data set, each of which passes `check`.

    Raises:
        ConfigError: pyarrow is not installed, there is no such data set or split, a column holds
            what JSON cannot, or a row is faulty.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"path = '{path}': Parquet and saved data sets are read with pyarrow, which is not "
            "installed; pip install 'prompts-env[arrow]', or write the rows as .jsonl"
        ) from None
    try:
        table = (
            _read_folder(pyarrow, _folder_of(path, split))
            if path.is_dir()
            else pyarrow.parquet.read_table(path)
        )
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"path = '{path}' cannot be read: {str(error).splitlines()[0]}") from None
    for column in table.schema:
        _check_type(path, pyarrow, column)

    def finite(row: JsonObject) -> None:
        check(row_without_nan(row))

    number = 0
    for batch in table.to_batches(max_chunksize=_NUM_READ_AT_ONCE):
        for row in batch.to_pylist():
            check_row(path, number, row, finite)
            number += 1
    return ArrowRows(table)


def _read_folder(pyarrow: Any, folder: Path) -> Any:
    files = [one["filename"] for one in _read_json(folder / _STATE_FILE)["_data_files"]]
    maps = [pyarrow.memory_map(str(folder / name)) for name in files]
    return pyarrow.concat_tables([pyarrow.ipc.open_stream(one).read_all() for one in maps])


def _folder_of(path: Path, split: str | None) -> Path:
    """The folder of one data set: `path` itself, or its split."""
    if (path / _SPLITS_FILE).is_file():
        splits = _read_json(path / _SPLITS_FILE)["splits"]
        if split not in splits:
            raise ConfigError(
                f"path = '{path}' holds the splits {', '.join(splits)}, got split = {split!r}; set "
                "split, or test_split, to one of them"
            )
        return path / split
    if not (path / _STATE_FILE).is_file():
        raise ConfigError(
            f"path = '{path}': expected a folder that save_to_disk wrote, with {_STATE_FILE} or "
            f"{_SPLITS_FILE} in it; of Parquet files, name one"
        )
    return path


def _read_json(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"path = '{path}' cannot be read: {error}") from None


def _check_type(path: Path, pyarrow: Any, column: Any) -> None:
    types = pyarrow.types
    kinds = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_decimal)
    kind = column.type
    while types.is_list(kind) or types.is_large_list(kind):
        kind = kind.value_type
    parts = [part.type for part in kind] if types.is_struct(kind) else [kind]
    if any(is_kind(part) for part in parts for is_kind in kinds):
        raise ConfigError(
            f"path = '{path}': column '{column.name}' is of type {column.type}, which JSON "
            "cannot hold; write the data set without it"
        )
