"""How a language model sees an environment that was written for OpenEnv, which has no text.

It is shown the observation's fields. It answers with the action's only required field as
text, or with the whole action as JSON.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from ludus.env.types import Action, JsonObject, Message, Observation
from ludus.proto.errors import ActionParseError

_BESIDE = ("metadata", "legal_actions")
_MAX_SHOWN = 4000
"""Characters of one field; pixels as numbers say nothing to a reader."""


class OpenEnvRenderer:
    """Text for one environment; `action_type` publishes the foreign schema."""

    def __init__(self, name: str, action_type: type[Action]) -> None:
        self._name = name
        self._action_type = action_type
        self._schema = action_type.model_json_schema()
        required = self._schema.get("required", [])
        self._field = required[0] if len(required) == 1 else ""
        properties = self._schema.get("properties", {})
        self._kind = properties.get(self._field, {}).get("type") if self._field else None

    def render(self, observation: Observation, *, first: bool) -> list[Message]:
        """One message: the fields, one a line, and after a reset what to answer."""
        shown: JsonObject = observation.model_dump(mode="json")
        lines = [self._ask()] if first else []
        lines += [
            f"{name}: {_shortened(item if isinstance(item, str) else json.dumps(item))}"
            for name, item in shown.items()
            if name not in _BESIDE and item is not None
        ]
        return [{"role": "user", "content": "\n".join(lines) or "Nothing to see."}]

    def parse(self, text: str, observation: Observation) -> Action:
        """The action that the text means."""
        data = self._read(text)
        legal = self._legal(observation)
        if legal and data.get(self._field) not in legal:
            raise ActionParseError(f"expected one of {legal}, got {text[-200:]!r}")
        try:
            return self._action_type.model_validate(data)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False)[0]["msg"]
            raise ActionParseError(
                f"expected an action as described, got {text[-200:]!r}: {fault}"
            ) from None

    def legal_answers(self, observation: Observation) -> list[str]:
        """The observation's `legal_actions` as text, or the values of an enum."""
        return [
            one if isinstance(one, str) else json.dumps(one) for one in self._legal(observation)
        ]

    def _legal(self, observation: Observation) -> list[Any]:
        if not self._field:
            return []
        listed = (observation.model_extra or {}).get("legal_actions")
        if isinstance(listed, list):
            return listed
        return self._schema["properties"][self._field].get("enum", [])

    def _read(self, text: str) -> JsonObject:
        """The action's JSON."""
        if self._kind == "string" and not text.lstrip().startswith("{"):
            if "\x00" in text or not text.strip():
                raise ActionParseError(f"expected some text, got {text!r}")
            return {self._field: text}
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            raise ActionParseError(f"expected JSON, got {text[-200:]!r}; {self._ask()}") from None
        if isinstance(data, dict):
            return data
        if not self._field:
            raise ActionParseError(f"expected a JSON object, got {text[-200:]!r}")
        return {self._field: data}

    def _ask(self) -> str:
        if self._kind == "string":
            return f"You play {self._name}. Answer with the {self._field}."
        if self._field:
            described = json.dumps(self._schema["properties"][self._field])
            return f"You play {self._name}. Answer with the {self._field}, JSON like {described}."
        properties = json.dumps(self._schema.get("properties", {}))
        return f"You play {self._name}. Answer with a JSON object of these fields: {properties}."


def _shortened(text: str) -> str:
    rest = len(text) - _MAX_SHOWN
    return text if rest <= 0 else f"{text[:_MAX_SHOWN]}... ({rest} more characters)"
