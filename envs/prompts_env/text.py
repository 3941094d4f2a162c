"""Text of prompts: the messages of a row. Every response is an action."""

from __future__ import annotations

from collections.abc import Callable

from ludus.env import Message

from .models import PromptsAction, PromptsObservation


class PromptsRenderer:
    """Renderer that shows the messages and accepts every text as a response."""

    takes_any_text = True

    def __init__(self, example_answers: Callable[[], list[str]]) -> None:
        """Create a renderer.

        Args:
            example_answers: Function that returns example responses to the current prompt.
        """
        self._example_answers = example_answers

    def render(self, observation: PromptsObservation, *, first: bool) -> list[Message]:
        """Return the messages of the observation."""
        return [
            {"role": message.role, "content": message.content} for message in observation.messages
        ]

    def parse(self, text: str, observation: PromptsObservation) -> PromptsAction:
        """Return the text as a response."""
        return PromptsAction(text=text)

    def legal_answers(self, observation: PromptsObservation) -> list[str]:
        """Return the example responses."""
        return self._example_answers()
