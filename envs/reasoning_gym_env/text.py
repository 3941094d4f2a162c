"""Text format of reasoning tasks: the prompt is the generator's question and a format rule.

tags    user:      ... End with your answer in tags: <answer>your answer</answer>
        assistant: 3 + 4 = 7 <answer>7</answer>

plain   user:      ... Answer with the result alone, without an explanation.
        assistant: 7
"""

from __future__ import annotations

import re
from typing import Literal

from ludus.env import Message
from ludus.env.text import extract_answer, quote_end
from ludus.proto.errors import ActionParseError

from .models import ReasoningGymAction, ReasoningGymObservation

AnswerFormat = Literal["tags", "plain"]

_FORMAT_RULES: dict[AnswerFormat, str] = {
    "tags": "End with your answer in tags: <answer>your answer</answer>",
    "plain": "Answer with the result alone, without an explanation.",
}
_TAGS_PATTERN = re.compile(r"<answer>.*?</answer>", re.DOTALL | re.IGNORECASE)
_WHITESPACE = re.compile(r"\s+")


class ReasoningGymRenderer:
    """Renderer that shows the question and reads the answer."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._format = answer_format

    def render(self, observation: ReasoningGymObservation, *, first: bool) -> list[Message]:
        """Return the question and the format rule, or the score after the answer."""
        if observation.score is not None:
            return [{"role": "user", "content": f"The score is {observation.score:g}."}]
        text = f"{observation.question.strip()}\n\n{_FORMAT_RULES[self._format]}"
        return [{"role": "user", "content": text}]

    def parse(self, text: str, observation: ReasoningGymObservation) -> ReasoningGymAction:
        """Return the answer in the last tags, or a response without tags that is one line.

        With the format `plain`, responses of several lines need no tags.

        Raises:
            ActionParseError: The response contains no answer.
        """
        answer = extract_answer(text)
        has_tags = _TAGS_PATTERN.search(text) is not None
        is_whole_answer = self._format == "plain" or "\n" not in answer
        is_printable = _WHITESPACE.sub("", answer).isprintable()
        if not answer or not is_printable or not (has_tags or is_whole_answer):
            remedy = _FORMAT_RULES[self._format]
            raise ActionParseError(f"expected an answer, got {quote_end(text)}; {remedy}")
        return ReasoningGymAction(answer=answer)

    def legal_answers(self, observation: ReasoningGymObservation) -> list[str]:
        """Return the solution that the observation contains; empty if it contains none."""
        if observation.score is not None or observation.correct_answer is None:
            return []
        answer = observation.correct_answer
        return [f"<answer>{answer}</answer>" if self._format == "tags" else answer]
