"""Arithmetic as text: "7 + 12 = ?", answered with the number.

The answer is the last whole number of the text, so "19", "7 + 12 = 19" and
"<think>7 + 12</think> It is 19." all say 19.
"""

from __future__ import annotations

import re

from ludus.env import Message
from ludus.proto.errors import ActionParseError

from .arithmetic import OPERATIONS
from .models import MathAction, MathObservation

# Neither a part of 3.5 or 1,000, nor the second number of 7-12 with a minus of its own; at most
# as many digits as any solution can have, and some to spare.
_WHOLE_NUMBER = re.compile(r"(?<![\d.,])(?:(?<!\w)-)?\d{1,12}(?![.,]?\d)")
_MAX_QUOTED_CHARS = 200


class MathRenderer:
    """Shows the question and reads the number."""

    def render(self, observation: MathObservation, *, first: bool) -> list[Message]:
        """For example "7 + 12 = ?"; after the answer, that the episode is over."""
        sign = OPERATIONS[observation.operation].sign
        question = f"{observation.left} {sign} {observation.right} = ?"
        return [{"role": "user", "content": question if first else "over"}]

    def parse(self, text: str, observation: MathObservation) -> MathAction:
        """The answer that the text means.

        Raises:
            ActionParseError: there is no whole number in it.
        """
        numbers = _WHOLE_NUMBER.findall(text)
        if not numbers:
            raise ActionParseError(
                f"expected a whole number, got {text[-_MAX_QUOTED_CHARS:]!r}; answer with the "
                "number alone"
            )
        return MathAction(answer=int(numbers[-1]))

    def legal_answers(self, observation: MathObservation) -> list[str]:
        """Every answer that there can be."""
        return [str(answer) for answer in observation.legal_actions]
