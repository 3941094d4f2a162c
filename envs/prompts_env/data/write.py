"""Writing of rows to a file that `prompts_env` can read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from ludus.env.encoding import replace_nan
from ludus.proto.errors import ConfigError

from .rows import split_columns

_JSON_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY


def write_rows(rows: Iterable[Mapping[str, Any]] | Mapping[str, Any], path: str | Path) -> Path:
    """Write rows to a .jsonl file, atomically, and return its path.

    Args:
        rows: Mappings, such as a list of dictionaries or a Hugging Face `Dataset`. Or columns of
            equal length by name, {"prompt": [...]}. NaN means a missing value.

    Raises:
        ConfigError: The path does not end with .jsonl, there are no rows, or a row is not JSON.
    """
    path = Path(path)
    if path.suffix != ".jsonl":
        raise ConfigError(f"the path must end with .jsonl, got '{path}'")
    if isinstance(rows, Mapping):
        try:
            rows = split_columns({str(name): list(column) for name, column in rows.items()})
        except ValueError as error:
            raise ConfigError(str(error)) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary_path = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            row_number = 0
            for row_number, row in enumerate(rows, start=1):
                file.write(_encode_row(row, row_number))
        if not row_number:
            raise ConfigError(f"'{path}' needs at least one row")
        os.chmod(temporary_path, 0o644)
        os.replace(temporary_path, path)
    except BaseException:
        os.unlink(temporary_path)
        raise
    return path


def _encode_row(row: Mapping[str, Any], row_number: int) -> bytes:
    if not isinstance(row, Mapping):
        raise ConfigError(f"row {row_number} must be an object, got {type(row).__name__}")
    try:
        return orjson.dumps(replace_nan(row), option=_JSON_OPTIONS)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"row {row_number} cannot be written as JSON: {error}") from None
