"""The tutorial's rules for sums and e-mails."""

from __future__ import annotations

import pytest

from examples.tutorial import reward_rules


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "worth"),
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
def test_a_number_is_worth_one_the_right_one_three_more_and_none_minus_one(
    text: str, worth: float
) -> None:
    assert reward_rules.math_answer([said(text)], target=["4"]) == [worth]


def test_the_criteria_of_an_e_mail_are_terms_of_their_own() -> None:
    mail = "Dear Ada,\n\nthe engine runs.\n\nBest regards\nCharles"
    short = "It runs."
    mails = [said(mail), said(short), said("word " * 121)]
    assert reward_rules.mail_mentions(mails, keyword=["Engine"] * 3) == [1, 0, 0]
    assert reward_rules.mail_is_ideal(mails, ideal=["it  runs."] * 3) == [0, 1, 0]
    assert reward_rules.mail_is_short(mails) == [0, 0, -1]
    assert reward_rules.mail_names_recipient(mails, recipient=["Ada"] * 3) == [1, 0, 0]
    assert reward_rules.mail_is_signed(mails) == [1, 0, 0]
