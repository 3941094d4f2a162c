"""Text of the echo environment: every response is a message, the prompt is its echo."""

from __future__ import annotations

from ludus.env import Message

from .models import EchoAction, EchoObservation

_EXAMPLES = ("hello", "good morning", "what a fine day it is", "one two three four five six seven")
"""Messages of different lengths, and so of different rewards."""


class EchoRenderer:
    """Renderer that shows the echo and accepts every text as a message."""

    takes_any_text = True

    def render(self, observation: EchoObservation, *, first: bool) -> list[Message]:
        """Return the echo, or the greeting before the first message."""
        return [{"role": "user", "content": observation.echoed_message}]

    def parse(self, text: str, observation: EchoObservation) -> EchoAction:
        """Return the text as a message."""
        return EchoAction(message=text)

    def legal_answers(self, observation: EchoObservation) -> list[str]:
        """Return some example messages."""
        return list(_EXAMPLES)
