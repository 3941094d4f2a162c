"""Rules that can be verified, as terms of a reward: sums for mathematics, criteria for e-mails.

    rewards = [{function = "reward_rules:math_answer"}]
    rewards = [
        {function = "reward_rules:mail_mentions"},
        {function = "reward_rules:mail_is_short", weight = 0.5},
    ]

Each function takes lists with one entry per episode of a group, and returns one number for each.
`target`, `keyword`, `ideal` and `recipient` are columns of the environment's tasks
(docs/environments.md), or fields of its last result's `info`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ludus.env import Message

Conversation = Sequence[Message]
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*(?:[eE][+-]?\d+)?")
_SIGNATURE = re.compile(r"(?im)^\s*(best|kind|warm) regards\b|^\s*(sincerely|yours)\b|^-- ?$")
_MAX_WORDS = 120


def math_answer(
    completions: Sequence[Conversation], target: Sequence[Any], **_: Any
) -> list[float]:
    """1 for saying a number and 3 more for the right one; -1 for saying none."""
    return [_math(_said(one), wanted) for one, wanted in zip(completions, target, strict=True)]


def mail_mentions(
    completions: Sequence[Conversation], keyword: Sequence[str], **_: Any
) -> list[float]:
    """1 where the required word is in it."""
    pairs = zip(completions, keyword, strict=True)
    return [float(word.casefold() in _said(one).casefold()) for one, word in pairs]


def mail_is_ideal(
    completions: Sequence[Conversation], ideal: Sequence[str], **_: Any
) -> list[float]:
    """1 where it is the ideal answer, but for spaces and upper case."""
    pairs = zip(completions, ideal, strict=True)
    return [float(_plain(_said(one)) == _plain(wanted)) for one, wanted in pairs]


def mail_is_short(completions: Sequence[Conversation], **_: Any) -> list[float]:
    """-1 where it is longer than 120 words."""
    return [-float(len(_said(one).split()) > _MAX_WORDS) for one in completions]


def mail_names_recipient(
    completions: Sequence[Conversation], recipient: Sequence[str], **_: Any
) -> list[float]:
    """1 where it names who it is for."""
    pairs = zip(completions, recipient, strict=True)
    return [float(name.casefold() in _said(one).casefold()) for one, name in pairs]


def mail_is_signed(completions: Sequence[Conversation], **_: Any) -> list[float]:
    """1 where it ends with a signature."""
    return [float(_SIGNATURE.search(_said(one)) is not None) for one in completions]


def _math(said: str, wanted: Any) -> float:
    numbers = _NUMBER.findall(said)
    if not numbers:
        return -1.0
    return 4.0 if _value(numbers[-1]) == _value(str(wanted)) else 1.0


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _said(conversation: Conversation) -> str:
    """The last answer; thoughts before it do not count."""
    answers = [one["content"] for one in conversation if one["role"] == "assistant"]
    return answers[-1].rpartition("</think>")[2] if answers else ""


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
