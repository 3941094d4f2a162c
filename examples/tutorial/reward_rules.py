"""Verifiable reward terms for math problems and e-mails.

    rewards = [{function = "reward_rules:math_answer"}]
    rewards = [
        {function = "reward_rules:mail_mentions"},
        {function = "reward_rules:mail_is_short", weight = 0.5},
    ]

Each function accepts lists with one entry per episode of a group and returns a reward per episode.
`target`, `keyword`, `ideal` and `recipient` are columns of the environment's tasks
(docs/environments.md), or fields of its last result's `info`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ludus.env import Message

Conversation = Sequence[Message]
_NUMBER_PATTERN = re.compile(r"-?\d+(?:[.,]\d+)*(?:[eE][+-]?\d+)?")
_SIGNATURE = re.compile(r"(?im)^\s*(best|kind|warm) regards\b|^\s*(sincerely|yours)\b|^-- ?$")
_MAX_WORDS = 120


def math_answer(
    completions: Sequence[Conversation], target: Sequence[Any], **_: Any
) -> list[float]:
    """Return 1 for a number, 3 more for the correct number, and -1 without a number."""
    pairs = zip(completions, target, strict=True)
    return [_rate_number(_find_response(messages), solution) for messages, solution in pairs]


def mail_mentions(
    completions: Sequence[Conversation], keyword: Sequence[str], **_: Any
) -> list[float]:
    """Return 1 if the e-mail contains the required word."""
    pairs = zip(completions, keyword, strict=True)
    return [
        float(word.casefold() in _find_response(messages).casefold()) for messages, word in pairs
    ]


def mail_is_ideal(
    completions: Sequence[Conversation], ideal: Sequence[str], **_: Any
) -> list[float]:
    """Return 1 if the e-mail equals the ideal, ignoring spaces and case."""
    pairs = zip(completions, ideal, strict=True)
    return [float(_clean(_find_response(messages)) == _clean(text)) for messages, text in pairs]


def mail_is_short(completions: Sequence[Conversation], **_: Any) -> list[float]:
    """Return -1 if the e-mail has more than 120 words."""
    return [-float(len(_find_response(messages).split()) > _MAX_WORDS) for messages in completions]


def mail_names_recipient(
    completions: Sequence[Conversation], recipient: Sequence[str], **_: Any
) -> list[float]:
    """Return 1 if the e-mail contains the recipient's name."""
    pairs = zip(completions, recipient, strict=True)
    return [
        float(name.casefold() in _find_response(messages).casefold()) for messages, name in pairs
    ]


def mail_is_signed(completions: Sequence[Conversation], **_: Any) -> list[float]:
    """Return 1 if the e-mail has a signature."""
    responses = map(_find_response, completions)
    return [float(_SIGNATURE.search(response) is not None) for response in responses]


def _rate_number(response: str, solution: Any) -> float:
    numbers = _NUMBER_PATTERN.findall(response)
    if not numbers:
        return -1.0
    return 4.0 if _parse_number(numbers[-1]) == _parse_number(str(solution)) else 1.0


def _parse_number(number: str) -> float:
    return float(number.replace(",", ""))


def _find_response(messages: Conversation) -> str:
    """Return the last response without its thoughts."""
    responses = [message["content"] for message in messages if message["role"] == "assistant"]
    return responses[-1].rpartition("</think>")[2] if responses else ""


def _clean(text: str) -> str:
    return " ".join(text.casefold().split())
