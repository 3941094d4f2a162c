"""Prompts as text: shown as they are, answered with anything."""

from __future__ import annotations

from collections.abc import Callable

from ludus.env import Message

from .models import PromptsAction, PromptsObservation


class PromptsRenderer:
    """Shows the prompt and takes every text for an answer."""

    takes_any_text = True

    def __init__(self, example_answers: Callable[[], list[str]]) -> None:
        """`example_answers` are what an answer may look like, where that is known."""
        self._example_answers = example_answers

    def render(self, observation: PromptsObservation, *, first: bool) -> list[Message]:
        """The messages of the row; after the last answer, that the episode is over."""
        return [{"role": one.role, "content": one.content} for one in observation.messages]

    def parse(self, text: str, observation: PromptsObservation) -> PromptsAction:
        """The text is the answer, whatever it is."""
        return PromptsAction(text=text)

    def legal_answers(self, observation: PromptsObservation) -> list[str]:
        """Some of the answers that there may be; none where no example is known."""
        return self._example_answers()
