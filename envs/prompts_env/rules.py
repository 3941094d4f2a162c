"""Verifiable rewards, as functions over the columns of a data set.

    math       a number 1, otherwise -1; the right number 3 more          columns: answer
    thinking   the right number after a thought 1, otherwise 0            columns: answer
    e-mail     keyword 1, similar to the ideal 1, too long -1,            columns: keyword, ideal,
               recipient 1, signature 1                                   recipient, max_words

Each criterion is a separate function, so that metrics can show it as a separate term. `math_rule`
and `email_rule` are sums of criteria, and `thinking_rule` requires two criteria. The text of a
completion is its last assistant message; except for `has_thought`, without the text before
</think>. Functions return one reward per episode, or None if the episode's row has no value for the
criterion.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from difflib import SequenceMatcher

from ludus.env import Message

CompletionMessages = str | Sequence[Message]
"""A completion: its text, or the messages of a conversation."""
Rewards = list[float | None]

MAX_WORDS = 150
"""Maximum number of words of an e-mail whose row has no limit."""
_MIN_SIMILARITY = 0.8
"""Minimum share of common words, in the same order, of two similar e-mails."""
_NUMBER_PATTERN = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d{1,40})(?:\.\d{1,40})?(?!\w)")
_CLOSING_PATTERN = re.compile(
    r"^(?:(?:best|kind|warm|many)\s+)?(?:regards|wishes|thanks|sincerely|cheers)"
    r"|^yours(?:\s+\w+)?|^best|^thank you|^sincerely yours",
    re.IGNORECASE,
)
_THOUGHT_START, _THOUGHT_END = "<think>", "</think>"
_MAX_CLOSING_WORDS = 3
_MAX_NAME_LINES = 3
"""Maximum number of lines after the closing: a name, and possibly a title and a company."""


# -- mathematics -----------------------------------------------------------------------


def math_rule(
    completions: Sequence[CompletionMessages], answer: Sequence[object], **_: object
) -> Rewards:
    """Return the sum of `has_number` and `matches_answer`: 4, 1 or -1."""
    return _add_rewards(has_number(completions), matches_answer(completions, answer))


def has_number(completions: Sequence[CompletionMessages], **_: object) -> Rewards:
    """Return 1 if the completion contains a number, otherwise -1."""
    return [
        -1.0 if _find_last_number(find_last_text(completion)) is None else 1.0
        for completion in completions
    ]


def matches_answer(
    completions: Sequence[CompletionMessages], answer: Sequence[object], **_: object
) -> Rewards:
    """Return 3 if the last numbers of the completion and of the column are equal, otherwise 0.

    The column may contain text: `#### 1,200` means 1200, and so does `1200.0`.
    """
    rewards: Rewards = []
    for completion, right_answer in zip(completions, answer, strict=True):
        right_number = None if right_answer is None else _find_last_number(str(right_answer))
        number = _find_last_number(find_last_text(completion))
        rewards.append(None if right_number is None else 3.0 * (number == right_number))
    return rewards


# -- thoughts --------------------------------------------------------------------------


def thinking_rule(
    completions: Sequence[CompletionMessages], answer: Sequence[object], **_: object
) -> Rewards:
    """Return 1 for the right number after a thought, as `has_thought` defines it, otherwise 0."""
    return [
        None if match is None else float(match > 0 and thought == 1)
        for match, thought in zip(
            matches_answer(completions, answer), has_thought(completions), strict=True
        )
    ]


def has_thought(completions: Sequence[CompletionMessages], **_: object) -> list[float]:
    """Return 1 if the completion is one <think>...</think> with text in it and after it, or 0.

    Nothing but whitespace may precede <think>. The completion may contain each mark only once.
    """
    return [float(_is_thought_and_answer(_find_last_completion(c))) for c in completions]


# -- e-mails ---------------------------------------------------------------------------


def email_rule(
    completions: Sequence[CompletionMessages],
    keyword: Sequence[object],
    ideal: Sequence[object],
    recipient: Sequence[object],
    max_words: Sequence[object] | None = None,
    **_: object,
) -> Rewards:
    """Return the sum of the five criteria, from -1 to 4. A criterion without a value counts 0."""
    return _add_rewards(
        _replace_none(has_keyword(completions, keyword)),
        _replace_none(matches_ideal(completions, ideal)),
        is_too_long(completions, max_words),
        _replace_none(names_recipient(completions, recipient)),
        has_signature(completions),
    )


def has_keyword(
    completions: Sequence[CompletionMessages], keyword: Sequence[object], **_: object
) -> Rewards:
    """Return 1 if the completion contains the column's word or all words of its list, or 0."""
    return [
        _score_words(completion, word_list)
        for completion, word_list in zip(completions, keyword, strict=True)
    ]


def matches_ideal(
    completions: Sequence[CompletionMessages], ideal: Sequence[object], **_: object
) -> Rewards:
    """Return 1 if the completion has the words of the column in their order, otherwise 0.

    The required similarity is a ratio of 0.8 by difflib, which is twice the number of common words
    divided by the number of words of both texts.
    """
    rewards: Rewards = []
    for completion, ideal_text in zip(completions, ideal, strict=True):
        if ideal_text is None:
            rewards.append(None)
            continue
        matcher = SequenceMatcher(
            None, _split_words(find_last_text(completion)), _split_words(str(ideal_text)), False
        )
        rewards.append(float(matcher.ratio() >= _MIN_SIMILARITY))
    return rewards


def is_too_long(
    completions: Sequence[CompletionMessages],
    max_words: Sequence[object] | None = None,
    **_: object,
) -> Rewards:
    """Return -1 if the completion has more words than the column allows, otherwise 0.

    The default limit is 150 words.
    """
    limits = [MAX_WORDS] * len(completions) if max_words is None else max_words
    return [
        -float(
            len(find_last_text(completion).split())
            > int(str(MAX_WORDS if limit is None else limit))
        )
        for completion, limit in zip(completions, limits, strict=True)
    ]


def names_recipient(
    completions: Sequence[CompletionMessages], recipient: Sequence[object], **_: object
) -> Rewards:
    """Return 1 if the completion contains the recipient's name, otherwise 0."""
    return [
        _score_words(completion, name)
        for completion, name in zip(completions, recipient, strict=True)
    ]


def has_signature(completions: Sequence[CompletionMessages], **_: object) -> Rewards:
    """Return 1 if the completion ends with a closing, such as "Best regards,", and a name."""
    return [float(_is_signed(find_last_text(completion))) for completion in completions]


# -- common parts ----------------------------------------------------------------------


def find_last_text(completion: CompletionMessages) -> str:
    """Return the text of a completion; of a conversation, its last assistant message."""
    return _find_last_completion(completion).rpartition(_THOUGHT_END)[2]


def _find_last_completion(completion: CompletionMessages) -> str:
    if isinstance(completion, str):
        return completion
    texts = [message["content"] for message in completion if message["role"] == "assistant"]
    return texts[-1] if texts else ""


def _is_thought_and_answer(text: str) -> bool:
    thought, _, answer = text.partition(_THOUGHT_END)
    first_text, start, thought = thought.partition(_THOUGHT_START)
    has_more_marks = any(mark in thought + answer for mark in (_THOUGHT_START, _THOUGHT_END))
    has_texts = bool(thought.strip() and answer.strip())
    return bool(start) and has_texts and not (first_text.strip() or has_more_marks)


def _find_last_number(text: str) -> Decimal | None:
    numbers = _NUMBER_PATTERN.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _score_words(completion: CompletionMessages, required_words: object) -> float | None:
    if required_words is None:
        return None
    text = find_last_text(completion)
    word_list = required_words if isinstance(required_words, (list, tuple)) else [required_words]
    word_patterns = [rf"(?<!\w){re.escape(str(word))}(?!\w)" for word in word_list]
    return float(all(re.search(pattern, text, re.IGNORECASE) for pattern in word_patterns))


def _split_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _is_signed(text: str) -> bool:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return any(
        _CLOSING_PATTERN.match(line)
        and len(line.split()) <= _MAX_CLOSING_WORDS
        and 1 <= len(lines) - 1 - index <= _MAX_NAME_LINES
        for index, line in enumerate(lines)
    )


def _replace_none(rewards: Rewards) -> Rewards:
    return [0.0 if reward is None else reward for reward in rewards]


def _add_rewards(*criteria: Rewards) -> Rewards:
    return [
        None if any(reward is None for reward in rewards) else sum(map(float, rewards))
        for rewards in zip(*criteria, strict=True)
    ]
