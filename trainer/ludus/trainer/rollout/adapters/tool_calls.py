"""Parser of the tool calls in a completion.

Hermes, Qwen                   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
Llama, the whole completion    {"name": "add", "parameters": {"a": 1}}
Mistral, the whole completion  [{"name": "add", "arguments": {"a": 1}}]

The error for an invalid call is written for the model, which can then correct the call.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import orjson

from ludus.env.types import Tool
from ludus.proto.errors import ActionParseError
from ludus.trainer.models.template import ToolSpec

MAX_CALLS = 8
"""Maximum number of calls in one completion."""
_MAX_QUOTED = 200
"""Maximum number of characters of an invalid call that its error quotes."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGGED_CALL = re.compile(f"{_OPEN}(.*?)(?:{_CLOSE}|$)", re.DOTALL)
_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in a completion."""

    name: str
    arguments: dict[str, Any]


def read_calls(text: str) -> list[ToolCall]:
    """Return the calls in a completion in order; empty if it contains none.

    Raises:
        ActionParseError: the completion contains a call that cannot be parsed.
    """
    if _OPEN in text:
        calls = [_parse_json(tagged) for tagged in _TAGGED_CALL.findall(text)]
    else:
        calls = _untagged_calls(text)
    if len(calls) > MAX_CALLS:
        raise ActionParseError(
            f"expected at most {MAX_CALLS} tool calls in one answer, got {len(calls)}; call the "
            "others after these have returned"
        )
    return [_parse_call(call) for call in calls]


def remove_calls(text: str) -> str:
    """Return the text of a completion with calls, without the calls."""
    return _TAGGED_CALL.sub("", text).strip() if _OPEN in text else ""


def first_call_end(text: str) -> int | None:
    """Return the end of the first call if another call follows it, and None otherwise."""
    match = _TAGGED_CALL.search(text)
    if match is None or _OPEN not in text[match.end() :]:
        return None
    return match.end()


def tool_spec(tool: Tool) -> ToolSpec:
    """Return the tool in the form that chat templates list."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _untagged_calls(text: str) -> list[Any]:
    """Return the calls in a completion that is only JSON; other JSON may be an action."""
    text = text.strip()
    if not text.startswith(("{", "[")):
        return []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = value if isinstance(value, list) else [value]
    return calls if calls and all(_looks_like_call(call) for call in calls) else []


def _looks_like_call(value: Any) -> bool:
    has_arguments = isinstance(value, dict) and any(key in value for key in _ARGUMENT_KEYS)
    return has_arguments and "name" in value


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ActionParseError(
            f"expected JSON between {_OPEN} and {_CLOSE}, got {_quote(text)}: {error}"
        ) from None


def _parse_call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ActionParseError(
            'expected a tool call like {"name": "...", "arguments": {...}}, got '
            f"{_quote(json.dumps(value))}"
        )
    arguments: Any = next((value[key] for key in _ARGUMENT_KEYS if key in value), {})
    if not isinstance(arguments, dict):
        raise ActionParseError(
            f"expected the arguments of '{value['name'][:_MAX_QUOTED]}' to be an object, got "
            f"{_quote(json.dumps(arguments))}"
        )
    _check_serializable(value)
    return ToolCall(value["name"], arguments)


def _check_serializable(call: Any) -> None:
    """Refuse lone surrogates and integers beyond 64 bits, which no protocol can transmit."""
    try:
        orjson.dumps(call)
    except TypeError as error:
        raise ActionParseError(
            f"expected a tool call that can be sent, got {_quote(json.dumps(call))}: {error}"
        ) from None


def _quote(text: str) -> str:
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}...")
