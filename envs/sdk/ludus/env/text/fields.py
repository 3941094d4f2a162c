"""Text for environments without a renderer: a list of fields, and an action to answer.

A language model sees the observation's fields. It answers with the action's only required field
as text, or with the whole action as JSON.
"""

from __future__ import annotations

import json
from typing import Any

from ludus.proto.errors import ActionParseError

JsonObject = dict[str, Any]

_HIDDEN_FIELDS = ("metadata", "legal_actions")
_MAX_FIELD_CHARS = 4000
"""Maximum length of a shown field, because long fields such as pixels do not help the model."""


class FieldsText:
    """The text of one environment, from its name and the JSON schema of its actions."""

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
