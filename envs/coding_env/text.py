"""Programming tasks as text: the answer is Python, bare or in a fence of three backticks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ludus.env import Message
from ludus.proto.errors import ActionParseError

from .models import CodeAction, CodeObservation

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_MAX_QUOTED_CHARS = 200


class CodingRenderer:
    """Shows the task, then how the program did; takes a text for a program, right or wrong."""

    def __init__(self, programs: Sequence[str] = ()) -> None:
        """`programs` are all that answer some task, where they can be listed."""
        self._programs = programs

    def render(self, observation: CodeObservation, *, first: bool) -> list[Message]:
        """The task; after a program, what is said of it."""
        content = observation.prompt if first else observation.feedback
        return [{"role": "user", "content": content}]

    def parse(self, text: str, observation: CodeObservation) -> CodeAction:
        """The last fenced block, or the whole text where there is none.

        Raises:
            ActionParseError: it is empty, or has characters that no source code may have.
        """
        blocks = _FENCED.findall(text)
        code = blocks[-1] if blocks else text
        if not code.strip() or "\0" in code:
            raise ActionParseError(
                f"expected Python code, got {code[:_MAX_QUOTED_CHARS]!r}; answer with the code "
                "alone, or in a fence of three backticks"
            )
        return CodeAction(code=code)

    def legal_answers(self, observation: CodeObservation) -> list[str]:
        """Programs that are right for some task, and wrong for others, where they can be listed."""
        return list(self._programs)
