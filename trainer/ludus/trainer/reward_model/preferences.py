"""What people prefer: rows of a data set as comparisons.

    {"prompt": ..., "chosen": ..., "rejected": ...}                      two answers
    {"query": ..., "sample0": ..., ..., "sample3": ..., "best": 2}       two or more

A prompt is a text or a list of messages, an answer likewise. Without a prompt the answers are
whole texts or conversations. Lists of whole numbers are tokens of the model's own tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ludus.env import Message
from ludus.proto.errors import ConfigError
from ludus.trainer.reward_model.rows import Row, rows_of

Said: TypeAlias = str | Sequence[Message] | Sequence[int]
"""A text, messages, or tokens."""

_SHAPES = "prompt, chosen, rejected; or query, sample0, sample1, ..., best"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answers to one prompt, of which one is preferred."""

    place: str
    """Where it stands, for people."""
    prompt: Said
    answers: tuple[Said, ...]
    best: int


def comparisons_of(path: Path) -> Iterator[Comparison]:
    """The comparisons of a data set; all have as many answers as the first.

    Raises:
        NotFoundError: there is no data set.
        ConfigError: a row is no comparison.
    """
    num_answers = 0
    for row in rows_of(path):
        comparison = _comparison(row)
        num_answers = num_answers or len(comparison.answers)
        if len(comparison.answers) != num_answers:
            raise ConfigError(
                f"{row.place}: expected {num_answers} answers, as the rows before have, got "
                f"{len(comparison.answers)}; give files of one shape"
            )
        yield comparison
    if not num_answers:
        raise ConfigError(f"data = '{path}': expected comparisons, got no row")


def _comparison(row: Row) -> Comparison:
    values = row.values
    if "chosen" in values or "rejected" in values:
        answers = [_said(row, "chosen"), _said(row, "rejected")]
        prompt = _said(row, "prompt") if "prompt" in values else ""
        return Comparison(row.place, prompt, tuple(answers), 0)
    names = _sample_names(values)
    if not names:
        raise ConfigError(
            f"{row.place}: expected columns {_SHAPES}; got {sorted(map(str, values))}"
        )
    answers = [_said(row, name) for name in names]
    return Comparison(row.place, _said(row, "query"), tuple(answers), _best(row, len(answers)))


def _sample_names(values: Mapping[str, Any]) -> list[str]:
    """sample0, sample1, ... as far as they go."""
    found = [name for name in values if re.fullmatch(r"sample\d+", str(name))]
    return [f"sample{number}" for number in range(len(found))]


def _best(row: Row, num_answers: int) -> int:
    best = row.values.get("best")
    try:
        index = int(str(best))
    except ValueError:
        index = -1
    if isinstance(best, bool) or not 0 <= index < num_answers:
        raise ConfigError(
            f"{row.place}: column 'best' expected the number of the preferred sample, 0 to "
            f"{num_answers - 1}, got {best!r}"
        )
    if num_answers < 2:
        raise ConfigError(f"{row.place}: expected sample0 and sample1 at least, got one sample")
    return index


def _said(row: Row, name: str) -> Said:
    value = row.values.get(name)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(one, int) and not isinstance(one, bool) for one in value):
            return value
        if all(_is_message(one) for one in value):
            return [Message(role=one["role"], content=one["content"]) for one in value]
    got = "nothing" if value is None else f"{value!r:.60}"
    raise ConfigError(
        f"{row.place}: column '{name}' expected a text, a list of messages "
        '{"role": ..., "content": ...}, or a list of token ids, got ' + got
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
