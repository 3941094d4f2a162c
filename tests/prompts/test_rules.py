"""The rules of the tutorial: what each answer is worth, criterion by criterion."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.config import load_run_config
from ludus.proto.runs import Resume
from ludus.trainer.checks.start import check_start
from ludus.trainer.rollout.reward_function import check_columns
from prompts_env import rules

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("said", "answer", "worth"),
    [
        ("42", 42, 4),
        ("The sum is 42.", "42", 4),
        ("It is 41, no: 42", "#### 42", 4),
        ("1,200", "1200.0", 4),
        ("-3.50 m", -3.5, 4),
        ("<think>maybe 42</think> It is 41.", 42, 1),
        ("41 or 42 or 43", 42, 1),
        ("<think>42</think> I do not know", 42, -1),
        ("forty-two", 42, -1),
        ("", 42, -1),
        ("x42y", 42, -1),
        ("9" * 50_000, 42, -1),
    ],
)
def test_a_number_is_worth_one_the_right_one_four_and_none_costs_one(
    said: str, answer: object, worth: float
) -> None:
    assert rules.math_rule([said], [answer]) == [worth]
    conversation = [{"role": "assistant", "content": "7"}, {"role": "assistant", "content": said}]
    assert rules.math_rule([conversation], [answer]) == [worth]


def test_a_row_without_a_right_number_cannot_be_scored() -> None:
    assert rules.math_rule(["1", "2"], [None, "two"]) == [None, None]


LETTER = """Dear Ms. Rivera,

your invoice is attached.

Best regards,
Sam Lee"""
ROW = {"keyword": ["invoice"], "ideal": [LETTER], "recipient": ["Rivera"], "max_words": [20]}


@pytest.mark.parametrize(
    ("changed", "worth"),
    [
        (LETTER, 4),
        (LETTER.replace("invoice", "bill"), 3),
        (LETTER.replace("Ms. Rivera", "customer"), 3),
        (LETTER.replace("Best regards,\nSam Lee", "Sam Lee"), 3),
        (LETTER.replace("attached", "attached " + "and so on " * 10), 2),
        ("Invoices for Riverand", 0),
        ("word " * 21, -1),
        ("<think>" + LETTER + "</think>Dear Ms. Rivera, it comes later.", 1),
    ],
)
def test_an_email_is_judged_by_five_criteria(changed: str, worth: float) -> None:
    assert rules.email_rule([changed], **ROW) == [worth]


@pytest.mark.parametrize(
    ("closing", "is_signed"),
    [
        ("Kind regards,\nSam", True),
        ("Yours sincerely\n\nSam Lee\nSales", True),
        ("Thanks,\nSam", True),
        ("Thanks for your patience with all of this,\nSam", False),
        ("Best regards,", False),
        ("Sam", False),
        ("Best regards,\na\nb\nc\nd", False),
    ],
)
def test_a_signature_is_a_closing_and_a_name_at_the_end(closing: str, is_signed: bool) -> None:
    assert rules.has_signature([f"Dear Kim,\nhello.\n{closing}"]) == [float(is_signed)]


def test_a_criterion_that_a_row_says_nothing_of_counts_nothing_and_limits_have_a_default() -> None:
    nothing = {"keyword": [None], "ideal": [None], "recipient": [None]}
    assert rules.email_rule(["word"], **nothing) == [0.0]
    assert rules.is_too_long(["word " * 150, "word " * 151]) == [0.0, -1.0]
    assert rules.is_too_long(["word " * 151], [None]) == [-1.0]
    assert rules.has_keyword(["a and b", "a"], [["a", "b"], ["a", "b"]]) == [1.0, 0.0]


@pytest.mark.parametrize("rule", ["math_rule", "email_rule"])
def test_columns_that_a_rule_needs_are_asked_for(rule: str) -> None:
    columns = ["prompt", "answer", "keyword", "ideal", "recipient"]
    check_columns([f"prompts_env.rules:{rule}"], columns, "environment")
    with pytest.raises(Exception, match="asks for"):
        check_columns([f"prompts_env.rules:{rule}"], ["prompt"], "environment")


@pytest.mark.parametrize("example", ["examples/math/rule.toml", "examples/email/tiny.toml"])
def test_the_examples_can_start(example: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    run = load_run_config(ROOT / example, [f"output_dir={tmp_path}"])
    check_start(run, Resume.NEVER)
