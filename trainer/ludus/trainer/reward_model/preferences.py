"""Preferences: the rows of a data set as comparisons.

    {"prompt": ..., "chosen": ..., "rejected": ...}                      two answers
    {"query": ..., "sample0": ..., ..., "sample3": ..., "best": 2}       two or more answers

A prompt or an answer is a text or a list of messages. Without a prompt, answers are complete texts
or conversations. Lists of integers are token ids of the model's tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ludus.env import Message
from ludus.proto.errors import ConfigError
from ludus.trainer.reward_model.rows import Row, read_rows

Content: TypeAlias = str | Sequence[Message] | Sequence[int]
"""A text, messages, or token ids."""

_COLUMNS = "prompt, chosen, rejected; or query, sample0, sample1, ..., best"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several answers to one prompt, one of which is preferred."""

    location: str
    """File and row number, for messages."""
    prompt: Content
    answers: tuple[Content, ...]
    best: int
    """Index of the preferred answer."""


def read_comparisons(path: Path) -> Iterator[Comparison]:
    """Yield the comparisons of a data set, which all have the same number of answers."""
    num_answers = 0
    for row in read_rows(path):
        comparison = _parse_row(row)
        num_answers = num_answers or len(comparison.answers)
        if len(comparison.answers) != num_answers:
            raise ConfigError(
                f"{row.location}: the row has {len(comparison.answers)} answers, but the rows "
                f"before have {num_answers}; all rows must have the same number"
            )
        yield comparison
    if not num_answers:
        raise ConfigError(f"data = '{path}' has no rows; give a file with comparisons")


def _parse_row(row: Row) -> Comparison:
    values = row.values
    if "chosen" in values or "rejected" in values:
        answers = [_read_content(row, "chosen"), _read_content(row, "rejected")]
        prompt = _read_content(row, "prompt") if "prompt" in values else ""
        return Comparison(row.location, prompt, tuple(answers), 0)
    num_samples = sum(bool(re.fullmatch(r"sample\d+", str(name))) for name in values)
    if not num_samples:
        raise ConfigError(
            f"{row.location}: the row needs columns {_COLUMNS}; got {sorted(map(str, values))}"
        )
    answers = [_read_content(row, f"sample{index}") for index in range(num_samples)]
    best_index = _parse_best(row, num_samples)
    return Comparison(row.location, _read_content(row, "query"), tuple(answers), best_index)


def _parse_best(row: Row, num_answers: int) -> int:
    best_index = row.values.get("best")
    try:
        index = int(str(best_index))
    except ValueError:
        index = -1
    if isinstance(best_index, bool) or not 0 <= index < num_answers:
        raise ConfigError(
            f"{row.location}: column 'best' must be the number of the preferred sample, 0 to "
            f"{num_answers - 1}, got {best_index!r}"
        )
    if num_answers < 2:
        raise ConfigError(
            f"{row.location}: a comparison needs at least sample0 and sample1, got one sample"
        )
    return index


def _read_content(row: Row, name: str) -> Content:
    return parse_content(row.values.get(name), f"{row.location}: column '{name}'")


def parse_content(value: object, name: str) -> Content:
    """Return a text, messages or token ids.

    Raises:
        ConfigError: the value is something else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return value
        if all(_is_message(item) for item in value):
            return [Message(role=item["role"], content=item["content"]) for item in value]
    raise ConfigError(
        f"{name} must be a text, a list of messages "
        f'{{"role": ..., "content": ...}}, or a list of token ids, got {value!r:.60}'
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
