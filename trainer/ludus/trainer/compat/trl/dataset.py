"""Conversion of a TRL data set into a file of rows, which `prompts_env` serves one by one.

list of rows, columns by name, or `datasets.Dataset` --checked--> NAME-input/train.jsonl
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import orjson

from ludus.env import Message
from ludus.env.encoding import row_without_nan
from ludus.proto.errors import ConfigError

PROMPT = "prompt"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows of a data set, each with a prompt."""

    rows: Sequence[Row]

    @classmethod
    def read(cls, dataset: Any, name: str) -> PromptRows:
        """Return the rows of the data set that a script passes as argument `name`."""
        rows = _list_rows(dataset, name)
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping) or not _is_prompt(row.get(PROMPT)):
                value = row.get(PROMPT) if isinstance(row, Mapping) else row
                raise ConfigError(
                    f"{name}: row {number} needs a '{PROMPT}' of text or of messages like "
                    f"{{'role': 'user', 'content': '...'}}, but has {value!r:.80}"
                )
        if not rows:
            raise ConfigError(f"{name} has no rows; pass at least one")
        return cls(rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> set[str]:
        """Names of all columns except the prompt."""
        return {key for row in self.rows for key in row} - {PROMPT}

    @property
    def prompts(self) -> list[str | list[Message]]:
        """Prompts of all rows."""
        return [row[PROMPT] for row in self.rows]

    def write(self, path: Path) -> None:
        """Write the rows atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            for number, row in enumerate(self.rows):
                try:
                    file.write(orjson.dumps(row_without_nan(row), option=_LINE))
                except (TypeError, ValueError) as error:
                    raise ConfigError(
                        f"row {number} contains a value that JSON does not support ({error}); "
                        "convert it to text, numbers, lists or dictionaries"
                    ) from None
        partial.replace(path)


_LINE = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY


def _list_rows(dataset: Any, name: str) -> list[Any]:
    if isinstance(dataset, Mapping):
        return _columns_to_rows(dataset, name)
    if isinstance(dataset, Iterable) and not isinstance(dataset, (str, bytes)):
        return list(dataset)
    raise ConfigError(
        f"{name} must be a list of dictionaries, columns by name, or a datasets.Dataset, but it is "
        f"{dataset!r:.80}; load a file with datasets.load_dataset"
    )


def _columns_to_rows(dataset: Mapping[Any, Any], name: str) -> list[Any]:
    if any(hasattr(column, "column_names") for column in dataset.values()):
        splits = sorted(map(str, dataset))
        raise ConfigError(f"{name} must be one data set, but it has the splits {splits}; pass one")
    for key, column in dataset.items():
        if isinstance(column, (str, bytes)) or not isinstance(column, Iterable):
            raise ConfigError(
                f"{name} needs a list of values, one per row, in column '{key}', but it has "
                f"{column!r:.60}"
            )
    columns = {str(key): list(column) for key, column in dataset.items()}
    lengths = {key: len(column) for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"{name} must have columns of one length, but has {lengths}")
    pairs = (zip(repeat(key), column, strict=False) for key, column in columns.items())
    return [dict(row) for row in zip(*pairs, strict=True)]


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
    )
