"""Opening of rows in a file or folder of any supported format.

.jsonl .ndjson .csv   indexed: the rows stay in the file
.json                 read into memory
.parquet              read into memory (needs pyarrow)
a folder              a Hugging Face data set written by save_to_disk, mapped (needs pyarrow)
"""

from __future__ import annotations

from pathlib import Path

import orjson

from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError

from .arrow_files import open_arrow
from .rows import ListedRows, RowCheck, Rows, check_row, make_row_error, split_columns
from .text_files import CsvRows, JsonLinesRows

_TEXT_FORMATS = {".jsonl": JsonLinesRows, ".ndjson": JsonLinesRows, ".csv": CsvRows}
_SUFFIXES = ", ".join((*_TEXT_FORMATS, ".json", ".parquet"))


def open_rows(path: Path, split: str | None, check: RowCheck) -> Rows:
    """Open a file or folder and check each row.

    Args:
        split: Name of a split, such as "train"; None for a folder without splits.

    Raises:
        ConfigError: There is no data set at `path`, it has no rows, or a row is invalid.
    """
    if not path.exists():
        raise ConfigError(
            f"path = '{path}' does not exist; give a file ({_SUFFIXES}) or a folder written by "
            "save_to_disk of Hugging Face's datasets"
        )
    rows: Rows
    if path.is_dir() or path.suffix == ".parquet":
        rows = open_arrow(path, split, check)
    elif path.suffix in _TEXT_FORMATS:
        rows = _TEXT_FORMATS[path.suffix](path, check)
    elif path.suffix == ".json":
        rows = _read_json(path, check)
    else:
        raise ConfigError(
            f"path = '{path}' must end with one of {_SUFFIXES}, got '{path.suffix}'; rename the "
            "file, or write it with prompts_env.write_rows"
        )
    if not len(rows):
        raise ConfigError(f"path = '{path}' must have at least one row")
    return rows


def _read_json(path: Path, check: RowCheck) -> ListedRows:
    try:
        content = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"path = '{path}' is not JSON: {error.msg} at line {error.lineno}; if each line has an "
            "object, rename it to .jsonl"
        ) from None
    if isinstance(content, dict):
        content = _read_columns(path, content)
    if not isinstance(content, list):
        raise ConfigError(
            f"path = '{path}' must contain a list of objects, or an object of columns, got "
            f"{type(content).__name__}"
        )
    for index, row in enumerate(content):
        if not isinstance(row, dict):
            raise make_row_error(path, index, f"expected an object, got {type(row).__name__}")
        check_row(path, index, row, check)
    return ListedRows(content)


def _read_columns(path: Path, content: JsonObject) -> list[JsonObject]:
    scalar_names = sorted(name for name, values in content.items() if not isinstance(values, list))
    if scalar_names:
        raise ConfigError(
            f"path = '{path}' must contain a list of objects, or an object whose values are lists, "
            f"but '{scalar_names[0]}' is not a list"
        )
    try:
        return split_columns(content)
    except ValueError as error:
        raise ConfigError(f"path = '{path}': {error}") from None
