"""A data set of TRL's as a file of rows, which `prompts_env` serves one by one.

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
    """Rows with a prompt each."""

    rows: Sequence[Row]

    @classmethod
    def of(cls, dataset: Any, name: str) -> PromptRows:
        """The rows of what a script passes as `name`.

        Raises:
            ConfigError: it holds no rows, or one without a prompt.
        """
        if dataset is None:
            raise ConfigError(f"{name} expected rows with a '{PROMPT}', got None; pass some")
        rows = _rows(dataset, name)
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping) or not _is_prompt(row.get(PROMPT)):
                found = row.get(PROMPT) if isinstance(row, Mapping) else row
                raise ConfigError(
                    f"{name}: row {number} expected a '{PROMPT}' of text or of messages like "
                    f"{{'role': 'user', 'content': '...'}}, got {found!r:.80}"
                )
        if not rows:
            raise ConfigError(f"{name} expected at least one row, got none")
        return cls(rows)

    @classmethod
    def of_optional(cls, dataset: Any, name: str) -> PromptRows | None:
        """See `of`; None where nothing is passed."""
        return None if dataset is None else cls.of(dataset, name)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> set[str]:
        """The names that some row has, but for the prompt's."""
        return {key for row in self.rows for key in row} - {PROMPT}

    @property
    def prompts(self) -> list[str | list[Message]]:
        """Of all rows."""
        return [row[PROMPT] for row in self.rows]

    def write(self, path: Path) -> None:
        """Write the rows, whole or not at all.

        Raises:
            ConfigError: a row holds what is no JSON.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".partial")
        with aside.open("wb") as file:
            for number, row in enumerate(self.rows):
                try:
                    file.write(orjson.dumps(row_without_nan(row), option=_LINE))
                except (TypeError, ValueError) as error:
                    raise ConfigError(
                        f"row {number} expected values that JSON knows, got one it does not "
                        f"({error}); turn it into text, numbers, lists or dictionaries"
                    ) from None
        aside.replace(path)


_LINE = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY


def _rows(dataset: Any, name: str) -> list[Any]:
    if isinstance(dataset, Mapping):
        return _rows_of_columns(dataset, name)
    if isinstance(dataset, Iterable) and not isinstance(dataset, (str, bytes)):
        return list(dataset)
    raise ConfigError(
        f"{name} expected rows (a list of dictionaries, columns by name, or a datasets.Dataset), "
        f"got {dataset!r:.80}; of a file, datasets.load_dataset makes one"
    )


def _rows_of_columns(dataset: Mapping[Any, Any], name: str) -> list[Any]:
    if any(hasattr(column, "column_names") for column in dataset.values()):
        splits = sorted(map(str, dataset))
        raise ConfigError(f"{name} expected one data set, got the splits {splits}; pass one")
    for key, column in dataset.items():
        if isinstance(column, (str, bytes)) or not isinstance(column, Iterable):
            raise ConfigError(
                f"{name} expected a list of values, one per row, as column '{key}', got "
                f"{column!r:.60}"
            )
    columns = {str(key): list(column) for key, column in dataset.items()}
    lengths = {key: len(column) for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"{name} expected columns of one length, got {lengths}")
    pairs = (zip(repeat(key), column, strict=False) for key, column in columns.items())
    return [dict(row) for row in zip(*pairs, strict=True)]


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(one, Mapping)
            and isinstance(one.get("role"), str)
            and isinstance(one.get("content"), str)
            for one in value
        )
    )
