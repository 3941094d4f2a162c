"""Reading the rows of a data set, if possible without loading whole files.

.jsonl, .json, .csv     read by this module
.parquet, .arrow        read by pyarrow, in batches
folder                  a data set saved by `datasets`, or all such files in it, in order of name
owner/name              a data set of Hugging Face, loaded by `datasets`
"""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.paths import describe_place, suggest_path

_ENCODING = "utf-8-sig"
"""UTF-8, with or without a byte-order mark."""
_DICT_FILE, _STATE_FILE = "dataset_dict.json", "state.json"
"""Files that `datasets` writes for a data set with several splits, and for each split."""
_TRAINING_SPLIT = "train"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""Form of the Hugging Face id of a data set."""
_NUM_ROWS_AT_ONCE = 1024
_MAX_FIELD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a data set."""

    location: str
    """File and row number, for messages."""
    columns: Mapping[str, Any]


def read_rows(path: Path, *, split: str = _TRAINING_SPLIT, field: str = "data") -> Iterator[Row]:
    """Yield the rows of a file, a folder, or a data set of Hugging Face.

    Args:
        split: split to read, if the data set has several.
        field: name of the configuration field with the path, for messages.
    """
    if _is_hub_id(path):
        for row_number, columns in enumerate(_load_from_hub(path, split, field), start=1):
            yield Row(f"{path}, split '{split}', row {row_number}", columns)
        return
    for file in _list_files(path, split=split, field=field):
        reader = _READERS.get(file.suffix, _read_arrow)
        try:
            for row_number, columns in enumerate(reader(file), start=1):
                if not isinstance(columns, Mapping):
                    raise ConfigError(
                        f"{file}, row {row_number}: a row must be an object with columns, got "
                        f"{type(columns).__name__}; for example "
                        '{"prompt": ..., "completion": ...}'
                    )
                yield Row(f"{file}, row {row_number}", columns)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"'{file}' cannot be read: {error}; expected UTF-8 text") from error


def check_rows_exist(path: Path, *, split: str = _TRAINING_SPLIT, field: str = "data") -> None:
    """Check that the files of a data set exist; see `read_rows`. A Hugging Face id is accepted."""
    if not _is_hub_id(path):
        _list_files(path, split=split, field=field)


def _list_files(path: Path, *, split: str = _TRAINING_SPLIT, field: str = "data") -> list[Path]:
    """Return the files of a data set on disk; see `read_rows`.

    Raises:
        NotFoundError: there is no data set.
        ConfigError: the file has another format, or there is no such split.
    """
    if not path.exists():
        raise NotFoundError(
            f"{field} = '{path}' does not exist{describe_place(path)}; "
            + suggest_path(
                path,
                f"give another file ({', '.join(_READERS)}), a folder of such files, a folder "
                "saved by `datasets`, or a Hugging Face id",
            )
        )
    if path.is_file():
        if path.suffix not in _READERS:
            raise ConfigError(
                f"{field} = '{path}' must end with one of {', '.join(_READERS)}; rename or convert "
                "the file"
            )
        return [path]
    if (path / _DICT_FILE).is_file():
        path = _find_split(path, split, field)
    if (path / _STATE_FILE).is_file():
        state = json.loads((path / _STATE_FILE).read_text(encoding="utf-8"))
        return [path / data_file["filename"] for data_file in state["_data_files"]]
    files = sorted(file for file in path.iterdir() if file.suffix in _READERS)
    if not files:
        raise NotFoundError(
            f"{field} = '{path}': the folder contains no file that ends with one of "
            f"{', '.join(_READERS)}, and was not saved by `datasets`"
        )
    return files


def _find_split(path: Path, split: str, field: str) -> Path:
    """Return the folder of a split."""
    splits = json.loads((path / _DICT_FILE).read_text(encoding="utf-8"))["splits"]
    if split not in splits:
        raise ConfigError(
            f"{field} = '{path}' has no split '{split}', only {splits}; give the folder of one of "
            "them"
        )
    return path / split


def _is_hub_id(path: Path) -> bool:
    """Return whether the path is no file or folder, and has the form of a Hugging Face id."""
    return (
        not path.exists()
        and path.suffix not in _READERS
        and _HUB_ID.fullmatch(path.as_posix()) is not None
        and not path.parent.exists()
    )


def _load_from_hub(path: Path, split: str, field: str) -> Iterator[Any]:
    """Yield the rows of a data set of Hugging Face."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise NotFoundError(
            f"{field} = '{path}' does not exist here, and a data set of Hugging Face needs the "
            "package datasets; run `pip install datasets`, or give a file or a folder"
        ) from None
    try:
        rows = datasets.load_dataset(path.as_posix(), split=split)
    except Exception as error:  # the package raises many types of errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotFoundError(
            f"{field} = '{path}': the data set cannot be loaded from Hugging Face ({reason}); "
            f"check its id, its split '{split}' and the network, or give a file or a folder"
        ) from error
    yield from rows


def _read_json_lines(file: Path) -> Iterator[Any]:
    with file.open(encoding=_ENCODING) as lines:
        for row_number, line in enumerate(filter(str.strip, lines), start=1):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{file}, row {row_number}: expected one JSON object per line, got "
                    f"{line.strip()[:60]!r} ({error})"
                ) from None


def _read_json(file: Path) -> Iterator[Any]:
    # The JSON module cannot read a list in parts.
    try:
        rows = json.loads(file.read_text(encoding=_ENCODING))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"'{file}' cannot be read: {error}; a file with one object per line must be "
            "named .jsonl"
        ) from None
    if not isinstance(rows, list):
        raise ConfigError(f"'{file}' must contain a list of objects, got {type(rows).__name__}")
    yield from rows


def _read_csv(file: Path) -> Iterator[Any]:
    csv.field_size_limit(_MAX_FIELD_BYTES)
    with file.open(encoding=_ENCODING, newline="") as lines:
        yield from csv.DictReader(lines)


def _read_parquet(file: Path) -> Iterator[Any]:
    with _import_pyarrow(file) as arrow, arrow.parquet.ParquetFile(file) as parquet:
        for batch in parquet.iter_batches(batch_size=_NUM_ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _read_arrow(file: Path) -> Iterator[Any]:
    with _import_pyarrow(file) as arrow, arrow.memory_map(str(file)) as source:
        for batch in arrow.ipc.open_stream(source):
            for start in range(0, batch.num_rows, _NUM_ROWS_AT_ONCE):
                yield from batch.slice(start, _NUM_ROWS_AT_ONCE).to_pylist()


@contextmanager
def _import_pyarrow(file: Path) -> Iterator[Any]:
    """Yield the module; turn its errors, mostly ValueErrors, into a ConfigError with the file."""
    try:
        arrow = importlib.import_module("pyarrow")
        for module_name in ("pyarrow.ipc", "pyarrow.parquet"):
            importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"reading '{file}' needs pyarrow, which is not installed ({error}); run `pip install "
            "pyarrow`, or convert the data to .jsonl or .csv"
        ) from error
    try:
        yield arrow
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"'{file}' cannot be read: {error}; check that the file is complete and has the format "
            "of its suffix"
        ) from error


_READERS: Mapping[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
