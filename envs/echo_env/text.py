"""Echoes as text: what a model says is the message, and what it is shown is the echo."""

from __future__ import annotations

from ludus.env import Message

from .models import EchoAction, EchoObservation

_SAID = ("hello", "good morning", "what a fine day it is", "one two three four five six seven")
"""Messages of different worth, for who has to choose one."""


class EchoRenderer:
    """Shows the echo and takes every text for a message."""

    takes_any_text = True

    def render(self, observation: EchoObservation, *, first: bool) -> list[Message]:
        """The echo; before the first one, that the environment is ready."""
        return [{"role": "user", "content": observation.echoed_message}]

    def parse(self, text: str, observation: EchoObservation) -> EchoAction:
        """The text is the message, whatever it is."""
        return EchoAction(message=text)

    def legal_answers(self, observation: EchoObservation) -> list[str]:
        """Some of the messages that there may be."""
        return list(_SAID)
