"""Texts of other programs cannot control a terminal or forge a line of a log."""

from __future__ import annotations

import json
import logging
import unicodedata

import pytest

from ludus.env.text.terminal import (
    LogFormatter,
    clean_for_terminal,
    clean_json_for_terminal,
    format_notice,
)

HIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
HIDDEN_CODES = [
    code
    for code in (*range(0x3000), *range(0xD800, 0xD810), *range(0xFE00, 0x10000), 0xE0041)
    if unicodedata.category(chr(code)) in HIDDEN_CATEGORIES
]


def format_record(message: str, *args: object, error: BaseException | None = None) -> str:
    exc_info = (type(error), error, error.__traceback__) if error is not None else None
    record = logging.LogRecord("ludus", logging.ERROR, "", 0, message, args, exc_info)
    return LogFormatter("%(levelname)s %(name)s: %(message)s").format(record)


@pytest.mark.parametrize(
    ("text", "shown_text"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x1b]8;;http://a\x1b\\link", r"\x1b]8;;http://a\x1b\link"),
        ("\x9b2J", r"\x9b2J"),
        ("a\x7fb\rc", r"a\x7fb\rc"),
        ("\u202eexe.txt\u2066", r"\u202eexe.txt\u2066"),
        ("a\u2028b\u2029c\x85d", r"a\u2028b\u2029c\x85d"),
        ("a\u200bb\ufeffc\u3164d", r"a\u200bb\ufeffc\u3164d"),
        ("\U000e0041\U000e0100", r"\U000e0041\U000e0100"),
        ("\ud800", r"\ud800"),
        ("a\nb\tc", r"a\nb\tc"),
        ("a" + "\u0301" * 8 + "b", "a" + "\u0301" * 8 + "b"),
        ("a" + "\u0301" * 10, "a" + "\u0301" * 8 + r"\u0301" * 2),
        ("é" + "\u0336\u20dd" * 5, "é" + "\u0336\u20dd" * 4 + r"\u0336\u20dd"),
        ("größer ❤\ufe0f 猫 → ±", "größer ❤\ufe0f 猫 → ±"),
    ],
)
def test_hidden_characters_become_visible_escapes(text: str, shown_text: str) -> None:
    assert clean_for_terminal(text) == shown_text
    assert clean_for_terminal(shown_text) == shown_text


def test_every_control_and_format_character_is_escaped() -> None:
    shown_text = clean_for_terminal("".join(map(chr, HIDDEN_CODES)))
    assert shown_text.isascii()
    assert shown_text.isprintable()


def test_newlines_and_tabs_are_kept_on_request() -> None:
    assert clean_for_terminal("a\nb\tc\rd\x0be", keep_newlines=True) == "a\nb\tc\\rd\\x0be"


def test_cleaned_json_has_the_same_value() -> None:
    value = {"a": "\x9b2J \u202e \x7f \U000e0041 größer\n"}
    json_text = clean_json_for_terminal(json.dumps(value, ensure_ascii=False))
    assert json.loads(json_text) == value
    assert json_text.isprintable()
    assert "größer" in json_text


def test_a_log_record_is_one_line() -> None:
    assert format_record("failed: %s", "a\nERROR root: forged\x1b[2J") == (
        r"ERROR ludus: failed: a\nERROR root: forged\x1b[2J"
    )


def test_lines_of_a_traceback_are_indented_in_a_log() -> None:
    try:
        raise ValueError("a\nERROR root: forged\x9b")
    except ValueError as error:
        line, *traceback_lines = format_record("failed", error=error).split("\n")
    assert line == "ERROR ludus: failed"
    assert all(part.startswith("    ") for part in traceback_lines)
    assert traceback_lines[-1] == r"    ERROR root: forged\x9b"


def test_a_log_record_has_a_maximum_length() -> None:
    error = ValueError("x" * 1_000_000)
    record = format_record("failed: %s", error, error=error)
    assert len(record) < 100_000
    assert "more characters)" in record


def test_further_lines_of_a_notice_are_indented() -> None:
    assert format_notice("error", "a\nerror: forged\n  b\x1b") == (
        "error: a\n  error: forged\n  b\\x1b"
    )
