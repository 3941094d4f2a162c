"""Which of some named moves a language model's text means: what renderers share in reading it.

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
    """The text in the last <answer> tags, or the whole text; what is in <think> does not count."""
    spoken = _THOUGHT.sub("", text)
    answers = _ANSWER.findall(spoken)
    return (answers[-1] if answers else spoken).strip()


def find_named_move(said: str, names: Iterable[str]) -> str | None:
    """The name that is all of what was said, else the only one in it as whole words; None for none.

    A name within a longer one that was said, such as "red 2" in "wild red 2", is not another one.
    """
    by_folded = {name.casefold(): name for name in names}
    folded = " ".join(said.split()).casefold()
    if folded in by_folded:
        return by_folded[folded]
    longest_first = sorted(filter(None, by_folded), key=len, reverse=True)
    if not longest_first:
        return None
    pattern = "|".join(map(re.escape, longest_first))
    found = set(re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", folded))
    return by_folded[found.pop()] if len(found) == 1 else None


def quoted(text: str) -> str:
    """The end of a text, quoted, for a message that refuses it."""
    return repr(text[-_MAX_QUOTED_CHARS:])
