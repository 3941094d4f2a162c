"""What travels between a server of echoes and its players; OpenEnv's names."""

from __future__ import annotations

from ludus.env import Action, Observation, State


class EchoAction(Action):
    """A message to be echoed."""

    message: str


class EchoObservation(Observation):
    """The echo."""

    echoed_message: str
    message_length: int = 0
    """Characters."""


class EchoState(State):
    """How many messages were echoed."""
