"""Tests that a model reads the characters of JSON, not their escapes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from ludus.env.text import FieldsText
from ludus.env.text.unicode import format_json
from ludus.proto.errors import ActionParseError
from ludus.trainer.models.probes import make_tool_list_message
from ludus.trainer.models.tool_calls import HERMES
from ludus.trainer.rollout.agents.conversation_tree import parse_response
from ludus.trainer.rollout.agents.endpoint.exchange import ChatMessage, FunctionCall

WORD = "漢字 ß 🙂"
ESCAPED_CALL = json.dumps({"name": "look", "arguments": {"word": WORD}})


def show_fields() -> str:
    schema = {"properties": {"words": {"type": "array", "items": {"enum": [WORD]}}}}
    return FieldsText("talk", {**schema, "required": ["words"]}).render({}, first=True)


def show_nested_field() -> str:
    return FieldsText("talk", {}).render({"rows": [WORD]}, first=False)


def show_legal_answer() -> str:
    schema = {"properties": {"move": {"enum": [{"to": WORD}]}}, "required": ["move"]}
    return FieldsText("talk", schema).legal_answers({})[0]


LOOK = {
    "type": "function",
    "function": {"name": "look", "description": WORD, "parameters": {}},
}


def show_tools() -> str:
    return make_tool_list_message([LOOK])["content"]


def show_malformed_call() -> str:
    with pytest.raises(ActionParseError) as raised:
        HERMES.read_calls(
            f"<tool_call>{json.dumps({'name': 'look', 'arguments': WORD})}</tool_call>", []
        )
    return str(raised.value)


def show_call_to_agent() -> str:
    response = parse_response(f"<tool_call>{ESCAPED_CALL}</tool_call>", [LOOK])
    return response.calls[0].arguments


def show_call_of_agent() -> str:
    calls = (FunctionCall("look", json.dumps({"word": WORD})),)
    return ChatMessage("assistant", "", calls).text


@pytest.mark.parametrize(
    "show",
    [
        show_fields,
        show_nested_field,
        show_legal_answer,
        show_tools,
        show_malformed_call,
        show_call_to_agent,
        show_call_of_agent,
    ],
)
def test_model_reads_the_characters_themselves(show: Callable[[], str]) -> None:
    assert WORD in show()


def test_json_text_has_no_lone_surrogates() -> None:
    assert format_json({"a": "\ud800", "b": "\U0001f642"}) == '{"a": "\ufffd", "b": "🙂"}'
