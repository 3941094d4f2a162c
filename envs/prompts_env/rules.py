"""Rewards that anybody can verify, as functions over the columns of a data set.

    math    a number 1, the right one 3 more, none -1                     columns: answer
    e-mail  keyword 1, as the ideal 1, too long -1, recipient 1,          columns: keyword, ideal,
            signature 1                                                   recipient, max_words

Each criterion is a function of its own, so that metrics show it where it is a term of its own;
`math_rule` and `email_rule` are their sums. A completion is the text of the last answer, without
what stands before </think>. Functions return a number per episode, None where its row does not say
what would be right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from difflib import SequenceMatcher

from ludus.env import Message

Completion = str | Sequence[Message]
Scores = list[float | None]

MAX_WORDS = 150
"""Of an e-mail whose row says no limit."""
_IDEAL_RATIO = 0.8
"""From which share of common words, in their order, two e-mails say the same."""
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d{1,40})(?:\.\d{1,40})?(?!\w)")
_CLOSINGS = re.compile(
    r"^(?:(?:best|kind|warm|many)\s+)?(?:regards|wishes|thanks|sincerely|cheers)"
    r"|^yours(?:\s+\w+)?|^best|^thank you|^sincerely yours",
    re.IGNORECASE,
)


# -- mathematics -----------------------------------------------------------------------


def math_rule(completions: Sequence[Completion], answer: Sequence[object], **_: object) -> Scores:
    """What number and right number come to: 4, 1 or -1."""
    return _sum(has_number(completions), matches_answer(completions, answer))


def has_number(completions: Sequence[Completion], **_: object) -> Scores:
    """1 where the answer holds a number, else -1."""
    return [-1.0 if _number(text_of(one)) is None else 1.0 for one in completions]


def matches_answer(
    completions: Sequence[Completion], answer: Sequence[object], **_: object
) -> Scores:
    """3 where the last number of the answer is the last one of the column, else 0.

    So `#### 1,200` as the column's text is 1200, and `1200.0` is the same.
    """
    scores: Scores = []
    for completion, truth in zip(completions, answer, strict=True):
        wanted = None if truth is None else _number(str(truth))
        given = _number(text_of(completion))
        scores.append(None if wanted is None else 3.0 * (given == wanted))
    return scores


# -- e-mails ---------------------------------------------------------------------------


def email_rule(
    completions: Sequence[Completion],
    keyword: Sequence[object],
    ideal: Sequence[object],
    recipient: Sequence[object],
    max_words: Sequence[object] | None = None,
    **_: object,
) -> Scores:
    """What the five criteria come to, from -1 to 4; one that a row says nothing of counts 0."""
    return _sum(
        _known(has_keyword(completions, keyword)),
        _known(matches_ideal(completions, ideal)),
        is_too_long(completions, max_words),
        _known(names_recipient(completions, recipient)),
        has_signature(completions),
    )


def has_keyword(
    completions: Sequence[Completion], keyword: Sequence[object], **_: object
) -> Scores:
    """1 where the column's word is there, or all of its words where it is a list; else 0."""
    return [_holds(one, words) for one, words in zip(completions, keyword, strict=True)]


def matches_ideal(
    completions: Sequence[Completion], ideal: Sequence[object], **_: object
) -> Scores:
    """1 where four fifths of the words are those of the column's text, in their order; else 0.

    The share is difflib's ratio, twice the common words over all words of both.
    """
    scores: Scores = []
    for completion, text in zip(completions, ideal, strict=True):
        if text is None:
            scores.append(None)
            continue
        matcher = SequenceMatcher(None, _words(text_of(completion)), _words(str(text)), False)
        scores.append(float(matcher.ratio() >= _IDEAL_RATIO))
    return scores


def is_too_long(
    completions: Sequence[Completion], max_words: Sequence[object] | None = None, **_: object
) -> Scores:
    """-1 where there are more words than the column says, or than 150; else 0."""
    limits = [MAX_WORDS] * len(completions) if max_words is None else max_words
    return [
        -float(len(text_of(one).split()) > int(str(MAX_WORDS if limit is None else limit)))
        for one, limit in zip(completions, limits, strict=True)
    ]


def names_recipient(
    completions: Sequence[Completion], recipient: Sequence[object], **_: object
) -> Scores:
    """1 where the recipient's name is there; else 0."""
    return [_holds(one, name) for one, name in zip(completions, recipient, strict=True)]


def has_signature(completions: Sequence[Completion], **_: object) -> Scores:
    """1 where the last lines are a closing, such as "Best regards,", and a name; else 0."""
    return [float(_is_signed(text_of(one))) for one in completions]


# -- what all of them read -------------------------------------------------------------


def text_of(completion: Completion) -> str:
    """The text of a completion: of its last answer, where it is a conversation."""
    if not isinstance(completion, str):
        said = [one["content"] for one in completion if one["role"] == "assistant"]
        completion = said[-1] if said else ""
    return completion.rpartition("</think>")[2]


def _number(text: str) -> Decimal | None:
    """The last number of a text."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def _holds(completion: Completion, wanted: object) -> float | None:
    if wanted is None:
        return None
    text = text_of(completion)
    words = wanted if isinstance(wanted, (list, tuple)) else [wanted]
    return float(
        all(re.search(rf"(?<!\w){re.escape(str(one))}(?!\w)", text, re.IGNORECASE) for one in words)
    )


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _is_signed(text: str) -> bool:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    closings = [place for place, line in enumerate(lines) if _CLOSINGS.match(line)]
    # A name, and perhaps a title and a company, after a line that is nothing but a closing.
    return any(
        len(lines[place].split()) <= 3 and 1 <= len(lines) - 1 - place <= 3 for place in closings
    )


def _known(scores: Scores) -> Scores:
    return [0.0 if score is None else score for score in scores]


def _sum(*criteria: Scores) -> Scores:
    return [
        None if any(score is None for score in scores) else sum(map(float, scores))
        for scores in zip(*criteria, strict=True)
    ]
