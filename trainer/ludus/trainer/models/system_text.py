"""The part of a first prompt before its first message: system messages and lists of tools.

first prompt:  header  system message, tools  header of the user  first message ...
                       '------ result ------'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import dropwhile, takewhile

from ludus.env import Message
from ludus.trainer.models.probes import PLACEHOLDER

_ROLE = re.compile(r"\A\s*(?:system|developer)(?:[ \t]*\n|:[ \t])", re.IGNORECASE)
"""Name of the role at the start, which remains of the header of a system message."""
_EMPTY_LINES = re.compile(r"\n{3,}")


def skip_system_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without the system messages at their start."""
    return list(dropwhile(lambda message: message["role"] == "system", messages))


def mark_first_message(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a mark as the text of the first one after the system messages."""
    conversation = skip_system_messages(messages)
    system_messages = messages[: len(messages) - len(conversation)]
    marked: list[Message] = [{**message, "content": PLACEHOLDER} for message in conversation[:1]]
    return [*system_messages, *marked, *conversation[1:]]


def extract_system_text(prompt: str, user_header: str, special_tokens: Iterable[str]) -> str:
    """Return the text of a prompt before its marked message; empty if there is none.

    Args:
        user_header: text that the template writes before a message of the user.
        special_tokens: texts of special tokens, which become line breaks.
    """
    text, mark, _ = prompt.partition(PLACEHOLDER)
    if not mark:
        return ""
    for token in special_tokens:
        text, user_header = text.replace(token, "\n"), user_header.replace(token, "\n")
    text = text[: len(text) - _count_common_end(text, user_header)].strip()
    text = text.removeprefix(user_header.strip())  # some templates put all into one message
    return _EMPTY_LINES.sub("\n\n", _ROLE.sub("", text)).strip()


def _count_common_end(first: str, second: str) -> int:
    """Return the number of equal characters at the ends of two texts."""
    pairs = zip(reversed(first), reversed(second), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
