"""Tool calls in a model's words: found, read, and refused with a reason a model can act on.

Hermes, Qwen               <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
Llama, the whole answer    {"name": "add", "parameters": {"a": 1}}
Mistral, the whole answer  [{"name": "add", "arguments": {"a": 1}}]
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
"""In one answer."""
_MAX_QUOTED = 200
"""Characters of a malformed call that its error repeats."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(f"{_OPEN}(.*?)(?:{_CLOSE}|$)", re.DOTALL)
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an answer makes."""

    name: str
    arguments: dict[str, Any]


def read_calls(answer: str) -> list[ToolCall]:
    """The calls that an answer makes, in order; none where it only talks.

    Raises:
        ActionParseError: it means to call a tool, but not in a way that can be read.
    """
    if _OPEN in answer:
        written = [_json_of(text) for text in _TAGGED.findall(answer)]
    else:
        written = _bare_calls(answer)
    if len(written) > MAX_CALLS:
        raise ActionParseError(
            f"expected at most {MAX_CALLS} tool calls in one answer, got {len(written)}; call the "
            "others after these have returned"
        )
    return [_call_of(one) for one in written]


def words_beside_calls(answer: str) -> str:
    """What an answer that makes calls says beside them."""
    return _TAGGED.sub("", answer).strip() if _OPEN in answer else ""


def end_of_first_call(answer: str) -> int | None:
    """Where the first call of an answer ends that makes another one; None where it makes none."""
    first = _TAGGED.search(answer)
    if first is None or _OPEN not in answer[first.end() :]:
        return None
    return first.end()


def tool_spec(tool: Tool) -> ToolSpec:
    """The tool as chat templates list it."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _bare_calls(answer: str) -> list[Any]:
    """An answer that is nothing but calls as JSON; other JSON may be an action of the game."""
    text = answer.strip()
    if not text.startswith(("{", "[")):
        return []
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = found if isinstance(found, list) else [found]
    return calls if calls and all(_looks_like_call(call) for call in calls) else []


def _looks_like_call(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and any(key in value for key in _ARGUMENTS)


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ActionParseError(
            f"expected JSON between {_OPEN} and {_CLOSE}, got {_quoted(text)}: {error}"
        ) from None


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ActionParseError(
            'expected a tool call like {"name": "...", "arguments": {...}}, got '
            f"{_quoted(json.dumps(value))}"
        )
    given: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if not isinstance(given, dict):
        raise ActionParseError(
            f"expected the arguments of '{value['name'][:_MAX_QUOTED]}' to be an object, got "
            f"{_quoted(json.dumps(given))}"
        )
    _check_sendable(value)
    return ToolCall(value["name"], given)


def _check_sendable(call: Any) -> None:
    """Refuse halves of a character, and whole numbers beyond 64 bits: no wire takes them."""
    try:
        orjson.dumps(call)
    except TypeError as error:
        raise ActionParseError(
            f"expected a tool call that can be sent, got {_quoted(json.dumps(call))}: {error}"
        ) from None


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}...")
