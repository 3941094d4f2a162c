"""Rewards of Gymformer's language environments, which are reward functions of a run, too.

    distance_to_answer   -|x - y| of <final_answer>x</final_answer>; -5 without x, -10 without tags
    summary_reward       up to 0.8 for brevity, and 0.2 for each key term

The functions with plural names accept lists with one entry per episode, as `environment.rewards`
passes them:

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
# float() also accepts nan, inf, 1_000 and digits of other scripts.
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")

_MIN_WORDS = 10
_MAX_WORDS = 50
_TERM_REWARD = 0.2


def extract_final_answer(text: str) -> str | None:
    """Return the content of the last <final_answer> in a text, or None."""
    answers = _FINAL_ANSWER.findall(text)
    return answers[-1].strip() if answers else None


def parse_number(text: str) -> float | None:
    """Return a text such as "7", "-3.5" or "1,200" as a float; None if it is no finite number."""
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text.replace(",", ""))
    return number if math.isfinite(number) else None


def distance_to_answer(text: str, solution: float) -> float:
    """Return minus the distance between the final answer in `text` and the solution."""
    answer = extract_final_answer(text)
    if answer is None:
        return NO_TAG_REWARD
    number = parse_number(answer)
    return NO_NUMBER_REWARD if number is None else -abs(number - solution)


def summary_reward(summary: str, key_terms: Sequence[str]) -> float:
    """Return the reward of a summary: 1 minus 1/50 for each word, plus 0.2 for each key term.

    A summary of fewer than ten words gets no reward for brevity. Any ten words that contain all
    terms therefore get the highest reward, even if they mean nothing. The formula is from
    Gymformer's documentation and does not measure the quality of a summary.
    """
    num_words = len(summary.split())
    brevity = max(0.0, 1.0 - num_words / _MAX_WORDS) if num_words >= _MIN_WORDS else 0.0
    lower_case_summary = summary.lower()
    return brevity + _TERM_REWARD * sum(term.lower() in lower_case_summary for term in key_terms)


def distances_to_answers(
    completions: Sequence[Sequence[Message]], answer: Sequence[Any], **_: Any
) -> list[float]:
    """Return `distance_to_answer` for each episode; `answer` is a column of the data set."""
    return [
        distance_to_answer(join_responses(messages), float(number))
        for messages, number in zip(completions, answer, strict=True)
    ]


def summary_rewards(
    completions: Sequence[Sequence[Message]], key_terms: Sequence[Sequence[str]], **_: Any
) -> list[float]:
    """Return `summary_reward` for each episode; `key_terms` is a column of the data set."""
    return [
        summary_reward(join_responses(messages), terms)
        for messages, terms in zip(completions, key_terms, strict=True)
    ]


def join_responses(messages: Sequence[Message]) -> str:
    """Return the policy's responses in an episode as one string."""
    return "".join(message["content"] for message in messages if message["role"] == "assistant")
