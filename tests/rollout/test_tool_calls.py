"""The forms of tool calls: what they accept, and their errors."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from ludus.proto.errors import ActionParseError
from ludus.trainer.models.tool_calls import CALL_FORMS, CallForm, ToolCall

FORMS = {form.name: form for form in CALL_FORMS}
PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "is_new": {"type": "boolean"},
    "items": {"type": "array"},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "anything": {},
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"properties": PROPERTIES}}}
]

CALLS = [
    ("json", '<|python_tag|>{"name": "add", "parameters": {"count": 1}}', {"count": 1}),
    ("glm", "<tool_call>add</tool_call>", {}),
    ("pythonic", "[add(text='it\\'s', items=[1, {'a': true}], count=-1)]", {
        "text": "it's", "items": [1, {"a": True}], "count": -1,
    }),
    ("pythonic", "<|tool_call_start|>[add(is_new=False)]<|tool_call_end|>", {"is_new": False}),
    ("harmony", 'to=functions.add<|channel|>commentary json<|message|>{"count": 1}', {"count": 1}),
    ("harmony", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"count": 1}', {
        "count": 1
    }),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"count": 1}}]', {"count": 1}),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"count": 1}', {"count": 1}),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"count": 1}', {"count": 1}),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n'
     '{"count": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', {"count": 1}),
    ("deepseek", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"count": 1}<｜tool▁call▁end｜>', {
        "count": 1
    }),
    ("gemma", '<|tool_call>call:add{text:<|"|>a, {b}<|"|>,items:[1,{a:null}]}<tool_call|>', {
        "text": "a, {b}", "items": [1, {"a": None}],
    }),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "arguments"), CALLS)
def test_call_is_read_and_removed(name: str, text: str, arguments: dict[str, Any]) -> None:
    form = FORMS[name]
    assert form.read_calls(text, TOOLS) == [ToolCall("add", arguments)]
    assert form.remove_calls(text) == ""


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "12", "12"),
        ("text", "a\nb < c", "a\nb < c"),
        ("count", "12", 12),
        ("is_new", "True", True),
        ("is_new", "false", False),
        ("items", '["a"]', ["a"]),
        ("limit", "null", None),
        ("limit", "3", 3),
        ("anything", "3", 3),
        ("anything", "three", "three"),
        ("unlisted", "three", "three"),
    ],
)
def test_text_has_the_type_of_the_schema(key: str, text: str, value: Any) -> None:
    parameter = f"<parameter={key}>\n{text}\n</parameter>"
    xml = f"<tool_call>\n<function=add>\n{parameter}\n</function>\n</tool_call>"
    glm = f"<tool_call>add\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    for form, call_text in ((FORMS["xml"], xml), (FORMS["glm"], glm)):
        assert form.read_calls(call_text, TOOLS) == [ToolCall("add", {key: value})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "xml",
            "<tool_call><function=add><parameter=count>many</parameter></function>",
        ),
        ("xml", "<tool_call>add</tool_call>"),
        ("xml", "<tool_call><function=add><parameter=count>1"),
        ("glm", "<tool_call>add<arg_key>count</arg_key>1</tool_call>"),
        ("pythonic", "[add(count=len('x'))]"),
        ("pythonic", "[add(1)]"),
        ("harmony", "to=functions.add<|message|>[1]"),
        ("mistral", "[TOOL_CALLS]add"),
        ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"),
        ("gemma", '<|tool_call>call:add{text:<|"|>a}<tool_call|>'),
        ("gemma", "<|tool_call>call:add{items:" + "[" * 1000 + "}<tool_call|>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"count": NaN}}</tool_call>'),
        ("json", '{"name": "add", "parameters": {"items": [1e999]}}'),
        ("xml", "<tool_call><function=add><parameter=count>NaN</parameter></function>"),
        ("pythonic", "[add(count=-1e999)]"),
        ("gemma", "<|tool_call>call:add{count:Infinity}<tool_call|>"),
        ("pythonic", "[add(items=" + "[" * 10_000 + ")]"),
    ],
)
def test_invalid_call_is_an_error_with_limited_length(name: str, text: str) -> None:
    with pytest.raises(ActionParseError) as error_info:
        FORMS[name].read_calls(text, TOOLS)
    assert len(error_info.value.message) < 600


@pytest.mark.parametrize("form", CALL_FORMS, ids=lambda form: form.name)
def test_answer_contains_no_call(form: CallForm) -> None:
    for text in ("HIT", "[1, 2]", '{"answer": 3}', "<b>HIT</b>", "add(1)", ""):
        assert form.read_calls(text, TOOLS) == []


def test_only_the_first_of_several_calls_is_kept() -> None:
    block = "<tool_call><function=add></function></tool_call>"
    assert FORMS["xml"].find_call_end(f"Ask. {block}\n{block}") == len(f"Ask. {block}")
    assert FORMS["xml"].find_call_end(block) is None


@pytest.mark.parametrize("form", CALL_FORMS, ids=lambda form: form.name)
def test_long_repetitions_are_read_in_linear_time(form: CallForm) -> None:
    """A quadratic search would exceed the time limit of the tests."""
    parts = (
        "to=functions.",
        "\n",
        "[",
        "<parameter=a>",
        "<arg_key>",
        "<｜tool▁call▁begin｜>",
        '<|"|>',
    )
    for part in parts:
        with suppress(ActionParseError):
            form.read_calls(f"{form.marker}{part * 3000}", TOOLS)
