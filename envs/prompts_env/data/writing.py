"""Rows of a program as a file that `prompts_env` reads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from ludus.env.encoding import row_without_nan
from ludus.proto.errors import ConfigError

from .rows import rows_of_columns

_LINE = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY


def write_rows(rows: Iterable[Mapping[str, Any]] | Mapping[str, Any], path: str | Path) -> Path:
    """The path of a .jsonl file that holds the rows now, whole or not at all.

    Args:
        rows: mappings, such as a list of dictionaries or a Hugging Face `Dataset`; or columns of
            equal length by name, {"prompt": [...]}. NaN in them is a value that is missing.

    Raises:
        ConfigError: the path has another ending, there are no rows, or one is no object of JSON.
    """
    path = Path(path)
    if path.suffix != ".jsonl":
        raise ConfigError(f"expected a path that ends with .jsonl, got '{path}'")
    if isinstance(rows, Mapping):
        try:
            rows = rows_of_columns({str(name): list(column) for name, column in rows.items()})
        except ValueError as error:
            raise ConfigError(str(error)) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            number = 0
            for number, row in enumerate(rows, start=1):
                file.write(_line(row, number))
        if not number:
            raise ConfigError(f"expected at least one row for '{path}', got none")
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
    return path


def _line(row: Mapping[str, Any], number: int) -> bytes:
    if not isinstance(row, Mapping):
        raise ConfigError(f"row {number}: expected an object, got {type(row).__name__}")
    try:
        return orjson.dumps(row_without_nan(row), option=_LINE)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"row {number}: expected what JSON can hold, {error}") from None
