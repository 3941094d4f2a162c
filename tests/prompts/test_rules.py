"""Tests of the rule-based rewards for math problems and emails."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.config import load_run_config
from ludus.proto.runs import Resume
from ludus.trainer.driver.checks import check_start
from ludus.trainer.rollout.rewards.arguments import check_columns
from prompts_env import rules

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
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
def test_math_rule_rewards_correct_responses(text: str, answer: object, reward: float) -> None:
    assert rules.math_rule([text], [answer]) == [reward]
    conversation = [{"role": "assistant", "content": "7"}, {"role": "assistant", "content": text}]
    assert rules.math_rule([conversation], [answer]) == [reward]


def test_row_without_a_number_has_no_reward() -> None:
    assert rules.math_rule(["1", "2"], [None, "two"]) == [None, None]


@pytest.mark.parametrize(
    ("text", "has_thought", "reward"),
    [
        ("<think>40+2=42</think>42", 1, 1),
        ("\n<think>\n40 < 42\n</think>\n\nThe sum is 42.", 1, 1),
        ("<think>40+2=42</think>41", 1, 0),
        ("<think>41</think>", 0, 0),
        ("<think> </think>42", 0, 0),
        ("<think>40+2=42", 0, 0),
        ("40+2=42</think>42", 0, 0),
        ("42", 0, 0),
        ("</think><think>40+2=42 42", 0, 0),
        ("Well, <think>40+2=42</think>42", 0, 0),
        ("<think>40</think><think>2</think>42", 0, 0),
        ("<think>40<think>2</think>42", 0, 0),
        ("<think>40</think>2</think>42", 0, 0),
        ("<think>40+2</think>42<think>", 0, 0),
        ("", 0, 0),
    ],
)
def test_thinking_rule_requires_one_thought_before_the_right_answer(
    text: str, has_thought: float, reward: float
) -> None:
    assert rules.has_thought([text]) == [has_thought]
    assert rules.thinking_rule([text], ["42"]) == [reward]
    conversation = [{"role": "assistant", "content": "7"}, {"role": "assistant", "content": text}]
    assert rules.thinking_rule([conversation], [42]) == [reward]
    assert rules.thinking_rule([text], [None]) == [None]


LETTER = """Dear Ms. Rivera,

your invoice is attached.

Best regards,
Sam Lee"""
LETTER_COLUMNS = {
    "keyword": ["invoice"],
    "ideal": [LETTER],
    "recipient": ["Rivera"],
    "max_words": [20],
}


@pytest.mark.parametrize(
    ("text", "reward"),
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
def test_email_rule_returns_the_expected_reward(text: str, reward: float) -> None:
    assert rules.email_rule([text], **LETTER_COLUMNS) == [reward]


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
def test_signature_requires_a_closing_and_a_name(closing: str, is_signed: bool) -> None:
    assert rules.has_signature([f"Dear Kim,\nhello.\n{closing}"]) == [float(is_signed)]


def test_missing_values_add_zero_reward() -> None:
    empty_columns = {"keyword": [None], "ideal": [None], "recipient": [None]}
    assert rules.email_rule(["word"], **empty_columns) == [0.0]
    assert rules.is_too_long(["word " * 150, "word " * 151]) == [0.0, -1.0]
    assert rules.is_too_long(["word " * 151], [None]) == [-1.0]
    assert rules.has_keyword(["a and b", "a"], [["a", "b"], ["a", "b"]]) == [1.0, 0.0]


@pytest.mark.parametrize("rule", ["math_rule", "thinking_rule", "email_rule"])
def test_missing_column_is_refused(rule: str) -> None:
    columns = ["prompt", "answer", "keyword", "ideal", "recipient"]
    check_columns([f"prompts_env.rules:{rule}"], columns, "environment")
    with pytest.raises(Exception, match="requires"):
        check_columns([f"prompts_env.rules:{rule}"], ["prompt"], "environment")


@pytest.mark.parametrize("example", ["examples/math/rule.toml", "examples/email/tiny.toml"])
def test_examples_pass_the_start_checks(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = load_run_config(ROOT / example, [f"output_dir={tmp_path}"])
    check_start(run, Resume.NEVER)
