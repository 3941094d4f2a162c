"""JSON of texts with lone surrogates, which are valid in Python and in no encoding.

A policy can put a lone surrogate into what its environment says: a program can raise
`ValueError(chr(0xd800))`, and Python's `json` accepts the escape of one. Such a text must not make
a step fail. A policy can also say such a text, in an action or a tool call.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from contextlib import suppress
from typing import Any

import orjson
from pydantic import BaseModel

from ludus.env.incoming.json_values import check_num_values

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def replace_surrogates(value: Any) -> Any:
    """Return a copy of a value in which U+FFFD replaces every lone surrogate of its texts.

    The two halves of a character become that character.
    """
    if isinstance(value, str):
        return _replace_in_text(value)
    if isinstance(value, dict):
        return {
            replace_surrogates(key): replace_surrogates(element) for key, element in value.items()
        }
    if isinstance(value, (list, set, frozenset)):
        return type(value)(map(replace_surrogates, value))
    if isinstance(value, tuple):
        return tuple(map(replace_surrogates, value))
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: replace_surrogates(part) for name, part in value})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value_copy = copy.copy(value)
        for field in dataclasses.fields(value):
            # Also sets the fields of frozen data classes.
            object.__setattr__(
                value_copy, field.name, replace_surrogates(getattr(value, field.name))
            )
        return value_copy
    return value


def dump_json(value: Any, option: int = 0) -> bytes:
    """Encode a value as JSON, with replaced surrogates.

    Raises:
        TypeError: JSON cannot encode the value.
    """
    try:
        return orjson.dumps(value, option=option)
    except TypeError:  # also the error for a surrogate
        return orjson.dumps(replace_surrogates(value), option=option)


def format_json(value: Any, **options: Any) -> str:
    """Return a value as JSON for a model, with all characters unescaped.

    An escaped character costs a model about six times the tokens. `options` are passed to
    `json.dumps`. Lone surrogates are replaced.

    Raises:
        TypeError: JSON cannot encode the value.
    """
    return _replace_in_text(json.dumps(value, ensure_ascii=False, **options))


def load_json(encoded_json: bytes | str) -> Any:
    """Parse JSON that another program has written, with replaced surrogates.

    Raises:
        JSONDecodeError: the text is not JSON.
    """
    try:
        return orjson.loads(encoded_json)
    except orjson.JSONDecodeError:
        text = (
            encoded_json if isinstance(encoded_json, str) else encoded_json.decode(errors="replace")
        )
        if not _SURROGATE_ESCAPE.search(text):
            raise
        with suppress(ValueError, RecursionError):
            return replace_surrogates(json.loads(text))
        raise


def parse_json(json_text: bytes | str) -> Any:
    """Parse JSON from outside, with replaced surrogates.

    Raises:
        InvalidCallError: the JSON has too many values.
        JSONDecodeError: the text is not JSON.
    """
    check_num_values(json_text)
    return load_json(json_text)


def _replace_in_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
