"""Parsing of moves in a completion, shared by renderers.

"<think>LEFT?</think> I go <answer>RIGHT</answer>"  --extract_answer-->  "RIGHT"
"I go right."  --find_named_move(.., ["LEFT", "RIGHT"])-->  "RIGHT"
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_THOUGHT = re.compile(r"<think>.*?(</think>|$)", re.DOTALL | re.IGNORECASE)
_MAX_QUOTED_CHARS = 200


def extract_answer(text: str) -> str:
    """Return the text in the last <answer> tags, or the whole text, without <think> parts."""
    answer = _THOUGHT.sub("", text)
    tagged = _ANSWER.findall(answer)
    return (tagged[-1] if tagged else answer).strip()


def find_named_move(text: str, names: Iterable[str]) -> str | None:
    """Return the name that the text equals, or the only name that it contains as whole words.

    A name inside a longer name, such as "red 2" in "wild red 2", is not counted.
    """
    by_folded = {name.casefold(): name for name in names}
    folded = " ".join(text.split()).casefold()
    if folded in by_folded:
        return by_folded[folded]
    longest_first = sorted(filter(None, by_folded), key=len, reverse=True)
    if not longest_first:
        return None
    pattern = "|".join(map(re.escape, longest_first))
    matches = set(re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", folded))
    return by_folded[matches.pop()] if len(matches) == 1 else None


def quote_end(text: str) -> str:
    """Quote the end of a text, for an error message."""
    return repr(text[-_MAX_QUOTED_CHARS:])
