"""Text for renderers: parsing of moves in a completion, and text for environments without one.

"<think>LEFT?</think> I go <answer>RIGHT</answer>"  --extract_answer-->  "RIGHT"
"I go right."  --find_named_move(.., ["LEFT", "RIGHT"])-->  "RIGHT"
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from ludus.proto.errors import ActionParseError

JsonObject = dict[str, Any]

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_THOUGHT = re.compile(r"<think>.*?(</think>|$)", re.DOTALL | re.IGNORECASE)
_MAX_QUOTED_CHARS = 200
_HIDDEN_FIELDS = ("metadata", "legal_actions")
_MAX_FIELD_CHARS = 4000
"""Maximum length of a shown field, because long fields such as pixels do not help the model."""


def extract_answer(text: str) -> str:
    """Return the text in the last <answer> tags, or the whole text, without <think> parts."""
    answer = _THOUGHT.sub("", text)
    tagged = _ANSWER.findall(answer)
    return (tagged[-1] if tagged else answer).strip()


def find_named_move(text: str, names: Iterable[str]) -> str | None:
    """Return the name that the text equals, or the only name that it contains as whole words.

    A name inside a longer name, such as "red 2" in "wild red 2", is not counted.
    """
    by_folded = {name.casefold(): name for name in names}
    folded = " ".join(text.split()).casefold()
    if folded in by_folded:
        return by_folded[folded]
    longest_first = sorted(filter(None, by_folded), key=len, reverse=True)
    if not longest_first:
        return None
    pattern = "|".join(map(re.escape, longest_first))
    matches = set(re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", folded))
    return by_folded[matches.pop()] if len(matches) == 1 else None


def quote_end(text: str) -> str:
    """Quote the end of a text, for an error message."""
    return repr(text[-_MAX_QUOTED_CHARS:])


class FieldsText:
    """The text of an environment without a renderer, from its name and its action schema.

    A language model sees the observation's fields. It answers with the action's only required
    field as text, or with the whole action as JSON.
    """

    def __init__(self, name: str, schema: JsonObject) -> None:
        self._name = name
        self._schema = schema
        required_fields = schema.get("required", [])
        self._field = required_fields[0] if len(required_fields) == 1 else ""
        properties = schema.get("properties", {})
        self._kind = properties.get(self._field, {}).get("type") if self._field else None

    def content(self, observation: JsonObject, *, first: bool) -> str:
        """Render a message with one field per line, preceded by instructions after a reset."""
        lines = [self._instructions()] if first else []
        lines += [
            f"{name}: {_shorten(item if isinstance(item, str) else json.dumps(item))}"
            for name, item in observation.items()
            if name not in _HIDDEN_FIELDS and item is not None
        ]
        return "\n".join(lines) or "Nothing to see."

    def action(self, text: str, observation: JsonObject) -> JsonObject:
        """Parse the action, as JSON, that the text means.

        Raises:
            ActionParseError: the text is not an action, or the action is not legal.
        """
        data = self._read(text)
        legal = self._legal(observation)
        if legal and data.get(self._field) not in legal:
            raise ActionParseError(f"expected one of {legal}, got {text[-200:]!r}")
        return data

    def legal_answers(self, observation: JsonObject) -> list[str]:
        """Return the observation's `legal_actions` as text, or the values of an enum."""
        return [
            action if isinstance(action, str) else json.dumps(action)
            for action in self._legal(observation)
        ]

    def _legal(self, observation: JsonObject) -> list[Any]:
        if not self._field:
            return []
        listed = observation.get("legal_actions")
        if isinstance(listed, list):
            return listed
        enum: list[Any] = self._schema["properties"][self._field].get("enum", [])
        return enum

    def _read(self, text: str) -> JsonObject:
        if self._kind == "string" and not text.lstrip().startswith("{"):
            if "\x00" in text or not text.strip():
                raise ActionParseError(f"expected some text, got {text!r}")
            return {self._field: text}
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            raise ActionParseError(
                f"expected JSON, got {text[-200:]!r}; {self._instructions()}"
            ) from None
        if isinstance(data, dict):
            return data
        if not self._field:
            raise ActionParseError(f"expected a JSON object, got {text[-200:]!r}")
        return {self._field: data}

    def _instructions(self) -> str:
        if self._kind == "string":
            return f"You play {self._name}. Answer with the {self._field}."
        if self._field:
            field_schema = json.dumps(self._schema["properties"][self._field])
            return (
                f"You play {self._name}. Answer with the {self._field}, JSON like {field_schema}."
            )
        properties = json.dumps(self._schema.get("properties", {}))
        return f"You play {self._name}. Answer with a JSON object of these fields: {properties}."


def _shorten(text: str) -> str:
    num_hidden = len(text) - _MAX_FIELD_CHARS
    return (
        text if num_hidden <= 0 else f"{text[:_MAX_FIELD_CHARS]}... ({num_hidden} more characters)"
    )
