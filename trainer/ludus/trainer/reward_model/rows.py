"""The rows of a data set on disk, one after the other: no file is ever held as a whole.

.jsonl, .json, .csv     read here
.parquet, datasets'     read by pyarrow, in parts
a folder                what `datasets` saved, else all such files in it, by name
"""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.proto.errors import ConfigError, NotFoundError

_TEXT = "utf-8-sig"
"""UTF-8, with the mark at its beginning that some programs write, or without."""
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_DICT_FILE, _STATE_FILE = "dataset_dict.json", "state.json"
"""Which `datasets` writes for a data set of several splits, and for each of them."""
_TRAINING_SPLIT = "train"
_ROWS_AT_ONCE = 1024
_MOST_FIELD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """A row, and where it stands."""

    place: str
    """For people: file and number."""
    values: Mapping[str, Any]


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a file or a folder.

    Raises:
        NotFoundError: there is nothing.
        ConfigError: it cannot be read as its name says.
    """
    for file in _files_of(path):
        try:
            for number, values in enumerate(_values_of(file), start=1):
                if not isinstance(values, Mapping):
                    kind = type(values).__name__
                    raise ConfigError(
                        f"{file}, row {number}: expected an object with columns, got {kind}; "
                        'write one {"prompt": ..., "chosen": ..., "rejected": ...} a row'
                    )
                yield Row(f"{file}, row {number}", values)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"'{file}' cannot be read: {error}; expected UTF-8 text") from error


def _files_of(path: Path) -> list[Path]:
    if not path.exists():
        raise NotFoundError(
            f"data = '{path}': nothing there; expected a file ({', '.join(_SUFFIXES)}), a folder "
            "of such files, or one that `datasets` saved"
        )
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise ConfigError(
                f"data = '{path}': expected a file that ends with one of {', '.join(_SUFFIXES)}; "
                "rename or convert it"
            )
        return [path]
    if (path / _DICT_FILE).is_file():
        path = _split_of(path)
    if (path / _STATE_FILE).is_file():
        state = json.loads((path / _STATE_FILE).read_text(encoding="utf-8"))
        return [path / one["filename"] for one in state["_data_files"]]
    files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    if not files:
        raise NotFoundError(
            f"data = '{path}': the folder holds no file that ends with one of "
            f"{', '.join(_SUFFIXES)}, and is none that `datasets` saved"
        )
    return files


def _split_of(path: Path) -> Path:
    """The folder of the split to train on."""
    splits = json.loads((path / _DICT_FILE).read_text(encoding="utf-8"))["splits"]
    if _TRAINING_SPLIT not in splits:
        raise ConfigError(
            f"data = '{path}': expected a split '{_TRAINING_SPLIT}', got {splits}; give the folder "
            "of one of them"
        )
    return path / _TRAINING_SPLIT


def _values_of(file: Path) -> Iterator[Any]:
    match file.suffix:
        case ".jsonl":
            return _json_lines(file)
        case ".json":
            return _json_list(file)
        case ".csv":
            return _csv_rows(file)
        case ".parquet":
            return _parquet_rows(file)
        case _:
            return _arrow_rows(file)


def _json_lines(file: Path) -> Iterator[Any]:
    with file.open(encoding=_TEXT) as lines:
        number = 0
        for line in lines:
            if not line.strip():
                continue
            number += 1
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{file}, row {number}: expected one JSON object a line, got "
                    f"{line.strip()[:60]!r} ({error})"
                ) from None


def _json_list(file: Path) -> Iterator[Any]:
    """A whole file of JSON is read at once: there is no other way to read it."""
    try:
        rows = json.loads(file.read_text(encoding=_TEXT))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"'{file}' cannot be read: {error}; a file with one object a line is named .jsonl"
        ) from None
    if not isinstance(rows, list):
        raise ConfigError(f"'{file}': expected a list of objects, got {type(rows).__name__}")
    yield from rows


def _csv_rows(file: Path) -> Iterator[Any]:
    csv.field_size_limit(_MOST_FIELD_BYTES)
    with file.open(encoding=_TEXT, newline="") as lines:
        yield from csv.DictReader(lines)


def _parquet_rows(file: Path) -> Iterator[Any]:
    arrow = _pyarrow(file)
    with _refusing(file), arrow.parquet.ParquetFile(file) as parquet:
        for batch in parquet.iter_batches(batch_size=_ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _arrow_rows(file: Path) -> Iterator[Any]:
    arrow = _pyarrow(file)
    with _refusing(file), arrow.memory_map(str(file)) as source:
        for batch in arrow.ipc.open_stream(source):
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield from batch.slice(start, _ROWS_AT_ONCE).to_pylist()


def _pyarrow(file: Path) -> Any:
    try:
        arrow = importlib.import_module("pyarrow")
        for part in ("pyarrow.ipc", "pyarrow.parquet"):
            importlib.import_module(part)
    except ImportError as error:
        raise ConfigError(
            f"'{file}' is read by pyarrow, which is not installed ({error}); run `pip install "
            "pyarrow`, or give the data as .jsonl or .csv"
        ) from error
    return arrow


@contextmanager
def _refusing(file: Path) -> Iterator[None]:
    """Says which file pyarrow cannot read; of its errors most are ValueErrors."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"'{file}' cannot be read: {error}; expected what its name says, whole"
        ) from error
