"""Helpers that parse completions, and default texts for environments without a renderer.

"<think>LEFT?</think> I go <answer>RIGHT</answer>"  --extract_answer-->  "RIGHT"
"I go right."  --find_named_action(.., ["LEFT", "RIGHT"])-->  "RIGHT"
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from ludus.env.incoming.json_values import check_num_values
from ludus.env.text.unicode import format_json, replace_surrogates
from ludus.proto.errors import ActionParseError, InvalidCallError

JsonObject = dict[str, Any]

_ANSWER_PATTERN = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_THOUGHT_PATTERN = re.compile(r"<think>.*?(</think>|$)", re.DOTALL | re.IGNORECASE)
_MAX_QUOTED_CHARS = 200
_HIDDEN_FIELDS = ("metadata", "legal_actions")
_MAX_FIELD_CHARS = 4000
"""Maximum length of a shown field; long fields such as pixels do not help the model."""


def extract_answer(text: str) -> str:
    """Return the text in the last <answer> tags, or the whole text; <think> parts are removed."""
    visible_text = _THOUGHT_PATTERN.sub("", text)
    tagged_answers = _ANSWER_PATTERN.findall(visible_text)
    return (tagged_answers[-1] if tagged_answers else visible_text).strip()


def find_named_action(text: str, names: Iterable[str]) -> str | None:
    """Return the name that the text equals, or the only name that it contains as whole words.

    A name inside a longer name, such as "red 2" in "wild red 2", is not counted.
    """
    name_by_folded_name = {name.casefold(): name for name in names}
    folded_text = " ".join(text.split()).casefold()
    if folded_text in name_by_folded_name:
        return name_by_folded_name[folded_text]
    sorted_names = sorted(filter(None, name_by_folded_name), key=len, reverse=True)
    if not sorted_names:
        return None
    pattern = "|".join(map(re.escape, sorted_names))
    matches = set(re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", folded_text))
    return name_by_folded_name[matches.pop()] if len(matches) == 1 else None


def quote_end(text: str) -> str:
    """Return the quoted end of a text, for an error message."""
    return repr(text[-_MAX_QUOTED_CHARS:])


class FieldsText:
    """A default renderer, built from an environment's name and its action schema.

    A language model sees the observation's fields. It answers with the action's only required
    field as text, or with the whole action as JSON.
    """

    def __init__(self, name: str, schema: JsonObject) -> None:
        self._name = name
        self._schema = schema
        required_fields = schema.get("required", [])
        self._action_field = required_fields[0] if len(required_fields) == 1 else ""
        properties = schema.get("properties", {})
        self._field_type = properties.get(self._action_field, {}).get("type")

    def render(self, observation: JsonObject, *, first: bool) -> str:
        """Render a message with one field per line, preceded by instructions after a reset."""
        lines = [self._write_instructions()] if first else []
        lines += [
            f"{name}: {_shorten(value if isinstance(value, str) else format_json(value))}"
            for name, value in observation.items()
            if name not in _HIDDEN_FIELDS and value is not None
        ]
        return "\n".join(lines) or "Nothing to see."

    def parse(self, text: str, observation: JsonObject) -> JsonObject:
        """Return the action that the text means, as JSON.

        Raises:
            ActionParseError: the text is not an action, or the action is not legal.
        """
        action = self._parse_json(text)
        legal_actions = self._list_legal_actions(observation)
        if legal_actions and action.get(self._action_field) not in legal_actions:
            raise ActionParseError(f"expected one of {legal_actions}, got {text[-200:]!r}")
        return action

    def legal_answers(self, observation: JsonObject) -> list[str]:
        """Return the observation's `legal_actions` as text, or the values of an enum."""
        return [
            action if isinstance(action, str) else format_json(action)
            for action in self._list_legal_actions(observation)
        ]

    def _list_legal_actions(self, observation: JsonObject) -> list[Any]:
        if not self._action_field:
            return []
        listed_actions = observation.get("legal_actions")
        if isinstance(listed_actions, list):
            return listed_actions
        enum_values: list[Any] = self._schema["properties"][self._action_field].get("enum", [])
        return enum_values

    def _parse_json(self, text: str) -> JsonObject:
        if self._field_type == "string" and not text.lstrip().startswith("{"):
            if "\x00" in text or not text.strip():
                raise ActionParseError(f"expected some text, got {text!r}")
            return {self._action_field: text}
        try:
            check_num_values(text)
            action = replace_surrogates(json.loads(text))
        except InvalidCallError as error:
            raise ActionParseError(error.message) from None
        except (ValueError, RecursionError):
            raise ActionParseError(
                f"expected JSON, got {text[-200:]!r}; {self._write_instructions()}"
            ) from None
        if isinstance(action, dict):
            return action
        if not self._action_field:
            raise ActionParseError(f"expected a JSON object, got {text[-200:]!r}")
        return {self._action_field: action}

    def _write_instructions(self) -> str:
        if self._field_type == "string":
            return f"You play {self._name}. Answer with the {self._action_field}."
        if self._action_field:
            field_schema = format_json(self._schema["properties"][self._action_field])
            return (
                f"You play {self._name}. Answer with the {self._action_field}, JSON like"
                f" {field_schema}."
            )
        properties = format_json(self._schema.get("properties", {}))
        return f"You play {self._name}. Answer with a JSON object of these fields: {properties}."


def _shorten(text: str) -> str:
    if len(text) <= _MAX_FIELD_CHARS:
        return text
    return f"{text[:_MAX_FIELD_CHARS]}... ({len(text) - _MAX_FIELD_CHARS} more characters)"
