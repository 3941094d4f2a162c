"""Text for environments without a renderer: rendered fields and parsed actions."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.env.text import FieldsText
from ludus.proto.errors import ActionParseError

ACTION_SCHEMA = {
    "properties": {"action_id": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["action_id"],
}
FIELDS = {"board": "x.o", "turn": 3, "note": None, "legal_actions": [1, 4], "metadata": {"a": 1}}


def make_one_field_text(kind: str, **field: Any) -> FieldsText:
    schema = {"properties": {"reply": {"type": kind, **field}}, "required": ["reply"]}
    return FieldsText("talk", schema)


def test_only_the_first_text_contains_instructions_before_the_fields() -> None:
    text = FieldsText("Row", ACTION_SCHEMA)
    assert text.render(FIELDS, first=False) == "board: x.o\nturn: 3"
    first_line, *other_lines = text.render(FIELDS, first=True).splitlines()
    assert first_line.startswith("You play Row. Answer with the action_id, JSON like")
    assert other_lines == ["board: x.o", "turn: 3"]
    assert text.render({}, first=False) == "Nothing to see."
    assert text.render({"pixels": "0" * 5000}, first=False).endswith("... (1000 more characters)")


def test_only_legal_actions_are_parsed() -> None:
    text = FieldsText("Row", ACTION_SCHEMA)
    assert text.legal_answers(FIELDS) == ["1", "4"]
    assert text.parse(" 4 ", FIELDS) == text.parse('{"action_id": 4}', FIELDS) == {"action_id": 4}
    for message in ("2", "four", '{"action": 4}', "[" * 100_000):
        with pytest.raises(ActionParseError):
            text.parse(message, FIELDS)
    assert text.parse("2", {}) == {"action_id": 2}, (
        "an action was refused although the legal actions are unknown"
    )


def test_string_field_accepts_any_text_unless_it_has_an_enum() -> None:
    unrestricted_text = make_one_field_text("string")
    assert unrestricted_text.parse("Hello, 4!", {}) == {"reply": "Hello, 4!"}
    assert unrestricted_text.legal_answers({}) == []
    with pytest.raises(ActionParseError, match="expected some text"):
        unrestricted_text.parse(" ", {})
    choice_text = make_one_field_text("string", enum=["left", "right"])
    assert choice_text.legal_answers({}) == ["left", "right"]
    with pytest.raises(ActionParseError, match=r"expected one of \['left', 'right'\]"):
        choice_text.parse("up", {})


def test_action_with_several_fields_must_be_a_json_object() -> None:
    schema = {"properties": {"x": {}, "y": {}}, "required": ["x", "y"]}
    text = FieldsText("Grid", schema)
    assert text.parse('{"x": 1, "y": 2}', {}) == {"x": 1, "y": 2}
    with pytest.raises(ActionParseError, match="expected a JSON object, got '3'"):
        text.parse("3", {})
