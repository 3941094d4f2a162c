"""The forms in which models write tool calls, and their parsers.

A chat template shows earlier calls in the form that its model was trained on. The form is found by
rendering a known call (`find_form`), so no names of models are needed.

    json        {"name": "add", "parameters": {"a": 1}}
    hermes      <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    xml         <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    glm         <tool_call>add <arg_key>a</arg_key> <arg_value>1</arg_value></tool_call>
    pythonic    [add(a=1)]
    harmony     to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>
    mistral     [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]
    deepseek    <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>
    gemma       <|tool_call>call:add{a:1}<tool_call|>

The forms xml and glm write all values as text. The tool's JSON schema says their types.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson

from ludus.env.text.unicode import format_json
from ludus.proto.errors import ActionParseError
from ludus.trainer.models.call_values import (
    GemmaReader,
    ToolSpec,
    cut,
    load_json,
    quote,
    read_python_value,
    read_text,
    trim_lines,
)

MAX_CALLS = 8
"""Maximum number of calls in one completion."""
_ARGUMENT_KEYS = ("arguments", "parameters")
_PARSE_ERRORS = (ValueError, SyntaxError, RecursionError, MemoryError)
_TAGGED_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in a completion."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default="", compare=False)
    """Id that the model gave the call; empty in most forms."""


class CallForm(ABC):
    """A form of tool calls in completions. A block is a part of a text with one or more calls."""

    name: ClassVar[str]
    """Name of the form, for messages and documentation."""
    marker: ClassVar[str] = ""
    """Special token that no other form uses; empty if there is none."""
    pattern: ClassVar[re.Pattern[str]] = re.compile(r"(?!)()")
    """Pattern of a block. Its first group is passed to `parse_block`."""

    @abstractmethod
    def parse_block(self, block: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        """Return the calls in a block.

        Raises:
            ActionParseError: the block cannot be parsed.
        """

    def find_blocks(self, text: str) -> list[tuple[int, int, str]]:
        """Return the start, the end and the inner text of each block."""
        return [(*match.span(), match[1]) for match in self.pattern.finditer(text)]

    def read_calls(self, text: str, tools: Sequence[ToolSpec] = ()) -> list[ToolCall]:
        """Return the calls in a completion without its thoughts, in order.

        Raises:
            ActionParseError: the completion contains a call that cannot be parsed.
        """
        calls: list[ToolCall] = []
        for _, _, block in self.find_blocks(text):
            calls += self.parse_block(block, tools)
            if len(calls) > MAX_CALLS:
                raise ActionParseError(
                    f"expected at most {MAX_CALLS} tool calls in one answer, got {len(calls)}; "
                    "call the others after these have returned"
                )
        for call in calls:
            _check_transfer(call)
        return calls

    def remove_calls(self, text: str) -> str:
        """Return the text of a completion that contains calls, without the calls."""
        for start, end, _ in reversed(self.find_blocks(text)):
            text = text[:start] + text[end:]
        return text.strip()

    def find_call_end(self, text: str) -> int | None:
        """Return the index after the first block if another block follows; otherwise None."""
        blocks = self.find_blocks(text)
        return blocks[0][1] if len(blocks) > 1 else None


class JsonForm(CallForm):
    """The form of Llama 3: the whole completion is a JSON call, or a list of them."""

    name = "json"

    def find_blocks(self, text: str) -> list[tuple[int, int, str]]:
        block = text.strip().removeprefix("<|python_tag|>")
        return [(0, len(text), block)] if _load_call_list(block) else []

    def parse_block(self, block: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        return [_read_call(call) for call in _load_call_list(block)]


class HermesForm(JsonForm):
    """The form of Hermes and Qwen. A completion that is a JSON call needs no tags."""

    name = "hermes"

    def find_blocks(self, text: str) -> list[tuple[int, int, str]]:
        if "<tool_call>" in text:
            return [(*match.span(), match[1]) for match in _TAGGED_CALL.finditer(text)]
        return super().find_blocks(text)

    def parse_block(self, block: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        if calls := _load_call_list(block):
            return [_read_call(call) for call in calls]
        return [_read_call(load_json(block, "JSON between <tool_call> and </tool_call>"))]


class XmlForm(CallForm):
    """The form of Qwen3-Coder, Qwen 3.5 and Nemotron 3: tags of functions and parameters."""

    name = "xml"
    pattern = _TAGGED_CALL
    _function = re.compile(r"<function=([^>\n]+)>(.*)\Z", re.DOTALL)

    def parse_block(self, block: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        match = self._function.match(block.strip().removesuffix("</function>"))
        if not match:
            raise ActionParseError(
                "expected a tool call like <function=NAME><parameter=KEY>VALUE</parameter>"
                f"</function>, got {quote(block)}"
            )
        name, (start, *parameters) = match[1].strip(), match[2].split("<parameter=")
        arguments: dict[str, Any] = {}
        for parameter in parameters:
            key, has_value, rest = parameter.partition(">")
            value, has_end, rest = rest.partition("</parameter>")
            if not has_value or not has_end or rest.strip():
                raise ActionParseError(f"expected a whole parameter, got {quote(parameter)}")
            arguments[key] = read_text(name, key, trim_lines(value), tools)
        if start.strip():
            raise ActionParseError(f"expected <parameter=KEY>, got {quote(start)}")
        return [ToolCall(name, arguments)]


class GlmForm(CallForm):
    """The form of GLM 4.5: a name, followed by tags of keys and values."""

    name = "glm"
    pattern = _TAGGED_CALL

    def parse_block(self, block: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        name, *pairs = block.split("<arg_key>")
        name = name.strip()
        if not name or any(character in name for character in "<>{}\n"):
            raise ActionParseError(
                "expected a tool call like NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>, "
                f"got {quote(block)}"
            )
        arguments: dict[str, Any] = {}
        for pair in pairs:
            key, _, rest = pair.partition("</arg_key>")
            start, has_start, rest = rest.partition("<arg_value>")
            value, has_end, rest = rest.partition("</arg_value>")
            if not has_start or not has_end or start.strip() or rest.strip():
                raise ActionParseError(f"expected a whole key and value, got {quote(pair)}")
            arguments[key] = read_text(name, key, value, tools)
        return [ToolCall(name, arguments)]


class PythonicForm(CallForm):
    """The form of LFM2 and Llama 4: a list of calls in Python's syntax."""

    name = "pythonic"
    marker = "<|tool_call_start|>"
    pattern = re.compile(
        r"(?:<\|tool_call_start\|>|<\|python_start\|>)(.*?)"
        r"(?:<\|tool_call_end\|>|<\|python_end\|>|\Z)",
        re.DOTALL,
    )
    _first_call = re.compile(r"\[\s*[\w.]+\(")

    def find_blocks(self, text: str) -> list[tuple[int, int, str]]:
        block = text.strip()
        if self._first_call.match(block) and block.endswith("]"):
            return [(0, len(text), block)]
        return super().find_blocks(text)

    def parse_block(self, block: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        try:
            body = ast.parse(block.strip(), mode="eval").body
            return [_read_python_call(call) for call in _list_items(body)]
        except _PARSE_ERRORS as error:
            raise ActionParseError(
                f"expected calls like [NAME(KEY=VALUE)], got {quote(block)}: {error}"
            ) from None


class HarmonyForm(CallForm):
    """The form of gpt-oss: a message to a function in the channel `commentary`."""

    name = "harmony"
    pattern = re.compile(
        # The limits of repetitions keep the search fast in texts of any length.
        r"((?:<\|start\|>assistant)? ?(?:<\|channel\|>commentary ?)?\bto=functions\.[^\s<]{1,64}"
        r" ?(?:<\|channel\|>commentary)? ?(?:<\|constrain\|>)?\w{0,20} ?<\|message\|>.*?)"
        r"(?:<\|call\|>|<\|end\|>|\Z)",
        re.DOTALL,
    )
    _name = re.compile(r"to=functions\.([^\s<]+)")

    def parse_block(self, block: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        header, _, arguments = block.partition("<|message|>")
        match = self._name.search(header)
        assert match is not None
        value = load_json(arguments, "JSON after <|message|>")
        return [_read_call({"name": match[1], "arguments": value})]


class MistralForm(CallForm):
    """The forms of Mistral: a JSON list, or a name and JSON arguments."""

    name = "mistral"
    marker = "[TOOL_CALLS]"
    pattern = re.compile(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|\Z)", re.DOTALL)
    _named = re.compile(
        r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]([^\[]*))?(?:\[ARGS\])?\s*(\{.*)\Z", re.DOTALL
    )

    def parse_block(self, block: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        if match := self._named.match(block):
            arguments = load_json(match[3], "JSON after the tool's name")
            return [_read_call({"name": match[1], "arguments": arguments, "id": match[2]})]
        calls = load_json(block, "JSON after [TOOL_CALLS]")
        return [_read_call(call) for call in (calls if isinstance(calls, list) else [calls])]


class DeepSeekForm(CallForm):
    """The forms of DeepSeek V3, R1 and V3.1: a name and JSON arguments between special tokens."""

    name = "deepseek"
    marker = "<｜tool▁call▁begin｜>"
    pattern = re.compile(
        r"(?:<｜tool▁calls▁begin｜>\s{0,4})?<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)"
        r"(?:\s{0,4}<｜tool▁calls▁end｜>)?",
        re.DOTALL,
    )
    _fenced = re.compile(r"([^\n]*)\n```json\n(.*?)(?:\n```)?\s*\Z", re.DOTALL)

    def parse_block(self, block: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        name, _, arguments = block.partition("<｜tool▁sep｜>")
        if match := self._fenced.match(arguments):
            name, arguments = match[1], match[2]
        value = load_json(arguments, "JSON after <｜tool▁sep｜>")
        return [_read_call({"name": name.strip(), "arguments": value})]


class GemmaForm(CallForm):
    """The form of Gemma 4: a name and values in braces, with texts between <|"|>."""

    name = "gemma"
    marker = "<|tool_call>"
    pattern = re.compile(r"<\|tool_call>(.*?)(?:<tool_call\|>|\Z)", re.DOTALL)
    _call = re.compile(r"\s*call:([^{]+)(\{.*)\Z", re.DOTALL)

    def parse_block(self, block: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        match = self._call.match(block)
        try:
            if not match:
                raise ValueError("the call has no name or no braces")
            return [ToolCall(match[1].strip(), GemmaReader(match[2].strip()).read_all())]
        except _PARSE_ERRORS as error:
            raise ActionParseError(
                f'expected a tool call like call:NAME{{KEY:<|"|>TEXT<|"|>}}, got {quote(block)}: '
                f"{error}"
            ) from None


HERMES = HermesForm()
"""Form of calls in the message that lists tools if a template does not list them."""
CALL_FORMS: tuple[CallForm, ...] = (
    JsonForm(),
    HERMES,
    XmlForm(),
    GlmForm(),
    PythonicForm(),
    HarmonyForm(),
    MistralForm(),
    DeepSeekForm(),
    GemmaForm(),
)


def find_form(text: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> CallForm | None:
    """Return the form in which a text contains these calls; None if the form is unknown."""
    return next((form for form in CALL_FORMS if has_calls(form, text, calls, tools)), None)


def has_calls(
    form: CallForm, text: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]
) -> bool:
    """Return True if a text contains exactly these calls in a form."""
    try:
        return form.read_calls(text, tools) == list(calls)
    except ActionParseError:
        return False


def _list_items(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.List | ast.Tuple) else [node]


def _read_python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("expected calls with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("expected named arguments")
        arguments[keyword.arg] = read_python_value(keyword.value)
    return ToolCall(ast.unparse(node.func), arguments)


def _load_call_list(text: str) -> list[Any]:
    """Return the calls in a text that consists of JSON calls; empty if it does not."""
    text = text.strip()
    if not text.startswith(("{", "[")):
        return []
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = calls if isinstance(calls, list) else [calls]
    return calls if calls and all(_looks_like_call(call) for call in calls) else []


def _looks_like_call(call: Any) -> bool:
    has_name = isinstance(call, dict) and "name" in call
    return has_name and any(key in call for key in _ARGUMENT_KEYS)


def _read_call(call: Any) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ActionParseError(
            'expected a tool call like {"name": "...", "arguments": {...}}, got '
            f"{quote(format_json(call))}"
        )
    arguments: Any = next((call[key] for key in _ARGUMENT_KEYS if key in call), {})
    if not isinstance(arguments, dict):
        raise ActionParseError(
            f"expected the arguments of '{cut(call['name'])}' to be an object, "
            f"got {quote(format_json(arguments))}"
        )
    call_id = call.get("id")
    return ToolCall(call["name"], arguments, call_id if isinstance(call_id, str) else "")


def _check_transfer(call: ToolCall) -> None:
    """Check that a call can be sent.

    Lone surrogates, integers beyond 64 bits, NaN and infinities cannot.
    """
    try:
        orjson.dumps([call.name, call.arguments])
        # orjson writes null for NaN and infinities.
        json.dumps(call.arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        quoted = quote(json.dumps([call.name, call.arguments]))
        raise ActionParseError(
            f"expected a tool call that can be sent, got {quoted}: {error}"
        ) from None
