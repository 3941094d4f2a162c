"""Text of programming tasks. The response is Python code, bare or in a code block."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ludus.env import Message
from ludus.proto.errors import ActionParseError

from .models import CodeAction, CodeObservation

_CODE_PATTERN = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_MAX_QUOTED_CHARS = 200


class CodingRenderer:
    """Renderer that shows the task and then the feedback. Every text with code is an action."""

    def __init__(self, programs: Sequence[str] = ()) -> None:
        """Create a renderer.

        Args:
            programs: Solutions of all tasks, if there are few enough to list.
        """
        self._programs = programs

    def render(self, observation: CodeObservation, *, first: bool) -> list[Message]:
        """Return the task, or the feedback on the last program."""
        content = observation.prompt if first else observation.feedback
        return [{"role": "user", "content": content}]

    def parse(self, text: str, observation: CodeObservation) -> CodeAction:
        """Return the last code block, or the whole text if there is none.

        Raises:
            ActionParseError: The code is empty or contains a null character.
        """
        blocks = _CODE_PATTERN.findall(text)
        code = blocks[-1] if blocks else text
        if not code.strip() or "\0" in code:
            raise ActionParseError(
                f"expected Python code, got {code[:_MAX_QUOTED_CHARS]!r}; answer with the code "
                "alone, or in a code block with three backticks"
            )
        return CodeAction(code=code)

    def legal_answers(self, observation: CodeObservation) -> list[str]:
        """Return the listed programs. Each solves some tasks and fails others."""
        return list(self._programs)
