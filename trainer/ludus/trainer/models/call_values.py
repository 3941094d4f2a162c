"""Values in tool calls: JSON, Python literals, Gemma's notation, and text with a JSON schema."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ludus.proto.errors import ActionParseError

ToolSpec = dict[str, Any]
"""A tool in the form of chat templates: {"type": "function", "function": {name, ...}}."""

_MAX_QUOTED_CHARACTERS = 200
"""Maximum number of characters that an error quotes from an invalid call."""
_MAX_DEPTH = 100
"""Maximum nesting of the values in a call."""


class GemmaReader:
    """A parser of Gemma's values."""

    _quote = '<|"|>'
    _plain_value = re.compile(r"[^,{}\[\]]+")

    def __init__(self, text: str) -> None:
        self._text = text
        self._index = 0

    def read_all(self) -> dict[str, Any]:
        """Return the object that is the whole text."""
        value = self._read_value(0)
        if self._index != len(self._text) or not isinstance(value, dict):
            raise ValueError(f"unexpected text at {self._index}")
        return value

    def _read_value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("the values are nested too deeply")
        if self._take(self._quote):
            return self._read_until(self._quote)
        if self._take("{"):
            return dict(self._read_items("}", depth, has_keys=True))
        if self._take("["):
            return [value for _, value in self._read_items("]", depth, has_keys=False)]
        match = self._plain_value.match(self._text, self._index)
        self._index = match.end() if match else self._index
        return json.loads(match[0]) if match else _fail("a value is missing")

    def _read_items(self, end: str, depth: int, *, has_keys: bool) -> Iterator[tuple[str, Any]]:
        if self._take(end):
            return
        while True:
            key = self._read_key() if has_keys else ""
            yield key, self._read_value(depth + 1)
            if self._take(end):
                return
            if not self._take(","):
                _fail(f"expected ',' or '{end}' at {self._index}")

    def _read_key(self) -> str:
        if self._take(self._quote):
            key = self._read_until(self._quote)
            return key if self._take(":") else _fail("a key has no value")
        return self._read_until(":").strip()

    def _read_until(self, end: str) -> str:
        index = self._text.find(end, self._index)
        if index < 0:
            _fail(f"{end} is missing")
        start, self._index = self._index, index + len(end)
        return self._text[start:index]

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._index):
            return False
        self._index += len(text)
        return True


def _fail(problem: str) -> Any:
    raise ValueError(problem)


def read_python_value(node: ast.expr) -> Any:
    """Return the value of a literal; JSON's names of constants are accepted too."""
    constants = {"true": True, "false": False, "null": None}
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in constants:
            return constants[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [read_python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(_read_key(key)): read_python_value(value) for key, value in pairs}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise ValueError("expected literal values")


def _read_key(node: ast.expr | None) -> Any:
    return read_python_value(node) if node is not None else _fail("expected literal keys")


def trim_lines(text: str) -> str:
    """Return a text without the line breaks that separate it from its tags."""
    return text.removeprefix("\n").removesuffix("\n")


def read_text(tool_name: str, key: str, text: str, tools: Sequence[ToolSpec]) -> Any:
    """Return the value of an argument that a form writes as text, typed by the tool's schema."""
    types = _list_types(_find_schema(tool_name, key, tools))
    if types == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=_fail)  # NaN and Infinity are no JSON
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    if not types or _get_types(value) & types:
        return value
    if "string" in types:
        return text
    raise ActionParseError(
        f"expected the argument '{cut(key)}' of '{cut(tool_name)}' to be "
        f"{' or '.join(sorted(types))}, got {quote(text)}"
    )


def _find_schema(tool_name: str, key: str, tools: Sequence[ToolSpec]) -> Any:
    for tool in tools:
        if tool["function"]["name"] == tool_name:
            properties = (tool["function"].get("parameters") or {}).get("properties") or {}
            return properties.get(key)
    return None


def _list_types(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; empty if the schema does not say them."""
    if not isinstance(schema, dict):
        return set()
    if isinstance(schema.get("type"), str):
        return {schema["type"]}
    if isinstance(schema.get("type"), list):
        return set(schema["type"])
    if isinstance(schema.get("enum"), list):
        return set().union(*(_get_types(value) for value in schema["enum"]))
    options = [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]
    option_types = [_list_types(option) for option in options]
    return set().union(*option_types) if all(option_types) else set()


def _get_types(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case None:
            return {"null"}
        case list():
            return {"array"}
    return {"object"}


def load_json(text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ActionParseError(f"expected {expected}, got {quote(text)}: {error}") from None


def cut(text: str) -> str:
    return text[:_MAX_QUOTED_CHARACTERS]


def quote(text: str) -> str:
    return repr(text if len(text) <= _MAX_QUOTED_CHARACTERS else f"{cut(text)}...")
