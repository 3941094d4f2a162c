"""Text format of arithmetic: the prompt is "7 + 12 = ?", the response is the number.

The answer is the last whole number of the response, so "19", "7 + 12 = 19" and
"<think>7 + 12</think> It is 19." all mean 19.
"""

from __future__ import annotations

import re

from ludus.env import Message
from ludus.proto.errors import ActionParseError

from .arithmetic import OPERATIONS
from .models import MathAction, MathObservation

# Excludes parts of "3.5" and "1,000", and reads the 12 of "7-12" without the minus sign. Twelve
# digits are more than any solution has.
_WHOLE_NUMBER_PATTERN = re.compile(r"(?<![\d.,])(?:(?<!\w)-)?\d{1,12}(?![.,]?\d)")
_MAX_QUOTED_CHARS = 200


class MathRenderer:
    """Renderer that shows the question and parses the number."""

    def render(self, observation: MathObservation, *, first: bool) -> list[Message]:
        """Return the question, or "over" after the answer."""
        sign = OPERATIONS[observation.operation].sign
        question = f"{observation.left} {sign} {observation.right} = ?"
        return [{"role": "user", "content": question if first else "over"}]

    def parse(self, text: str, observation: MathObservation) -> MathAction:
        """Return the answer in the text.

        Raises:
            ActionParseError: The text contains no whole number.
        """
        numbers = _WHOLE_NUMBER_PATTERN.findall(text)
        if not numbers:
            raise ActionParseError(
                f"expected a whole number, got {text[-_MAX_QUOTED_CHARS:]!r}; answer with the "
                "number alone"
            )
        return MathAction(answer=int(numbers[-1]))

    def legal_answers(self, observation: MathObservation) -> list[str]:
        """Return every number that can be the solution of a question."""
        return [str(answer) for answer in observation.legal_actions]
