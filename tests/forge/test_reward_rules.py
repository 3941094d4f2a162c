"""Reward functions of the tutorial for math problems and e-mails."""

from __future__ import annotations

import pytest

from examples.tutorial import reward_rules


def make_completion(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("It is 4.", 4.0),
        ("2 + 2 = 4", 4.0),
        ("4.0", 4.0),
        ("3", 1.0),
        ("cat", -1.0),
        ("<think>4</think>cat", -1.0),
        ("", -1.0),
    ],
)
def test_math_answer_reward_is_correct(text: str, reward: float) -> None:
    assert reward_rules.math_answer([make_completion(text)], target=["4"]) == [reward]


def test_each_criterion_of_an_e_mail_is_a_separate_reward() -> None:
    letter = "Dear Ada,\n\nthe engine runs.\n\nBest regards\nCharles"
    note = "It runs."
    mails = [make_completion(letter), make_completion(note), make_completion("word " * 121)]
    assert reward_rules.mail_mentions(mails, keyword=["Engine"] * 3) == [1, 0, 0]
    assert reward_rules.mail_is_ideal(mails, ideal=["it  runs."] * 3) == [0, 1, 0]
    assert reward_rules.mail_is_short(mails) == [0, 0, -1]
    assert reward_rules.mail_names_recipient(mails, recipient=["Ada"] * 3) == [1, 0, 0]
    assert reward_rules.mail_is_signed(mails) == [1, 0, 0]
