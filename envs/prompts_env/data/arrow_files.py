"""Rows of Parquet files and of data sets saved by Hugging Face's `datasets`. Needs pyarrow.

    FOLDER/dataset_dict.json      {"splits": ["train", "test"]}; each split is a subfolder
    FOLDER/state.json             {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}

Arrow files of a folder are memory-mapped. Parquet is compressed, so a file is read into memory.
NaN becomes null, as in pandas.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from ludus.env.encoding import replace_nan
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError

from .rows import RowCheck, check_row

_STATE_FILE = "state.json"
_SPLITS_FILE = "dataset_dict.json"
_ROWS_PER_BATCH = 1024
_INNER_TYPE_NAMES = ("value_type", "key_type", "item_type", "storage_type")
"""Attributes of the types of lists, dictionaries, maps and extensions."""


class ArrowRows:
    """The rows of an Arrow table."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._columns = tuple(table.column_names)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, in the order of the table."""
        return self._columns

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> JsonObject:
        (row,) = self._table.slice(index, 1).to_pylist()
        return replace_nan(row)


def open_arrow(path: Path, split: str | None, check: RowCheck) -> ArrowRows:
    """Open a Parquet file or a saved data set, and check each row.

    Raises:
        ConfigError: pyarrow is not installed, the data set or the split does not exist, the type of
            a column is not supported, or a row is invalid.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"path = '{path}': Parquet files and saved data sets need pyarrow, which is not "
            "installed; pip install pyarrow, or write the rows as .jsonl"
        ) from None
    try:
        table = (
            _read_folder(pyarrow, _find_data_set_folder(path, split))
            if path.is_dir()
            else pyarrow.parquet.read_table(path)
        )
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"cannot read path = '{path}': {str(error).splitlines()[0]}") from None
    for column in table.schema:
        _check_type(path, pyarrow, column)

    def check_without_nan(row: JsonObject) -> None:
        check(replace_nan(row))

    index = 0
    for batch in table.to_batches(max_chunksize=_ROWS_PER_BATCH):
        for row in batch.to_pylist():
            check_row(path, index, row, check_without_nan)
            index += 1
    return ArrowRows(table)


def _read_folder(pyarrow: Any, folder: Path) -> Any:
    file_names = [entry["filename"] for entry in _read_json(folder / _STATE_FILE)["_data_files"]]
    memory_maps = [pyarrow.memory_map(str(folder / name)) for name in file_names]
    return pyarrow.concat_tables([pyarrow.ipc.open_stream(file).read_all() for file in memory_maps])


def _find_data_set_folder(path: Path, split: str | None) -> Path:
    """Return the folder of one data set: `path`, or the folder of a split."""
    if (path / _SPLITS_FILE).is_file():
        splits = _read_json(path / _SPLITS_FILE)["splits"]
        if split is None or split not in splits:
            raise ConfigError(
                f"path = '{path}' has the splits {', '.join(splits)}, got split = {split!r}; set "
                "split, or test_split, to one of them"
            )
        return path / split
    if not (path / _STATE_FILE).is_file():
        raise ConfigError(
            f"path = '{path}' was not written by save_to_disk: it has no {_STATE_FILE} and no "
            f"{_SPLITS_FILE}; for Parquet files, give one file"
        )
    return path


def _read_json(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"cannot read path = '{path}': {error}") from None


def _check_type(path: Path, pyarrow: Any, column: Any) -> None:
    if any(
        _is_unsupported(pyarrow, value_type) for value_type in _list_types(pyarrow, column.type)
    ):
        raise ConfigError(
            f"path = '{path}': column '{column.name}' has the type {column.type}, which JSON does "
            "not support; write the data set without the column"
        )


def _list_types(pyarrow: Any, value_type: Any) -> Iterator[Any]:
    """Yield a type and all types within it, such as the fields of structs in a list."""
    yield value_type
    if pyarrow.types.is_struct(value_type):
        inner_types = [field.type for field in value_type]
    else:
        inner_types = [
            getattr(value_type, name) for name in _INNER_TYPE_NAMES if hasattr(value_type, name)
        ]
    for inner_type in inner_types:
        yield from _list_types(pyarrow, inner_type)


def _is_unsupported(pyarrow: Any, value_type: Any) -> bool:
    types = pyarrow.types
    return any(
        is_type(value_type)
        for is_type in (
            types.is_binary,
            types.is_large_binary,
            types.is_binary_view,
            types.is_fixed_size_binary,
            types.is_decimal,
            types.is_duration,
        )
    )
