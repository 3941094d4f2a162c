"""What answers are worth in Gymformer's language environments; as reward functions, too.

    distance_to_answer   -|x - y| of <final_answer>x</final_answer>; -5 without x, -10 without tags
    summary_reward       up to 1 for brevity, .2 for each key term

The functions with an s take lists, one entry per episode, as `environment.rewards` calls them:

    rewards = [{function = "ludus.trainer.compat.gymformer.env.rewards:distances_to_answers"}]
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ludus.env import Message

NO_TAG_REWARD = -10.0
NO_NUMBER_REWARD = -5.0

_FINAL_ANSWER = re.compile(r"<final_answer>(.*?)</final_answer>", re.DOTALL)
# Python would take nan, inf, 1_000 and other scripts' digits for numbers, too.
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")

_MIN_WORDS = 10
_MAX_WORDS = 50
_TERM_REWARD = 0.2


def final_answer(text: str) -> str | None:
    """What stands in the last <final_answer> of a text; None where there is none."""
    answers = _FINAL_ANSWER.findall(text)
    return answers[-1].strip() if answers else None


def number_in(text: str) -> float | None:
    """The number that a text is, as in "7", "-3.5" or "1,200"; None where it is no finite one."""
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text.replace(",", ""))
    return number if math.isfinite(number) else None


def distance_to_answer(text: str, solution: float) -> float:
    """How far the final answer of `text` is from the solution, as a reward of 0 or less."""
    answer = final_answer(text)
    if answer is None:
        return NO_TAG_REWARD
    number = number_in(answer)
    return NO_NUMBER_REWARD if number is None else -abs(number - solution)


def summary_reward(summary: str, key_terms: Sequence[str]) -> float:
    """What a summary is worth: 1 less a fiftieth for each word, and .2 for each key term.

    One of fewer than ten words gets nothing for its brevity. The best is therefore a text of just
    ten words that holds all terms (`best_summary_reward`), whether it says anything or not: this
    is the document's measure, not one of summaries.
    """
    num_words = len(summary.split())
    brevity = max(0.0, 1.0 - num_words / _MAX_WORDS) if num_words >= _MIN_WORDS else 0.0
    said = summary.lower()
    return brevity + _TERM_REWARD * sum(term.lower() in said for term in key_terms)


def best_summary_reward(key_terms: Sequence[str]) -> float:
    """The most that a summary can be worth; ten words have room for as many terms."""
    return max(
        summary_reward(" ".join([*key_terms, *["word"] * num_others]), key_terms)
        for num_others in range(_MAX_WORDS)
    )


def distances_to_answers(
    completions: Sequence[Sequence[Message]], answer: Sequence[Any], **_: Any
) -> list[float]:
    """`distance_to_answer` of each episode; `answer` is a column of the data set."""
    return [
        distance_to_answer(text_of(one), float(number))
        for one, number in zip(completions, answer, strict=True)
    ]


def summary_rewards(
    completions: Sequence[Sequence[Message]], key_terms: Sequence[Sequence[str]], **_: Any
) -> list[float]:
    """`summary_reward` of each episode; `key_terms` is a column of the data set."""
    return [
        summary_reward(text_of(one), terms)
        for one, terms in zip(completions, key_terms, strict=True)
    ]


def text_of(completion: Sequence[Message]) -> str:
    """What the policy has said in an episode."""
    return "".join(message["content"] for message in completion if message["role"] == "assistant")
