"""Messages between an echo_env server and its players, with OpenEnv's names."""

from __future__ import annotations

from ludus.env import Action, Observation, State


class EchoAction(Action):
    """A message to echo."""

    message: str


class EchoObservation(Observation):
    """The echo."""

    echoed_message: str
    message_length: int = 0
    """Number of characters."""


class EchoState(State):
    """State of the episode. `step_count` is the number of echoed messages."""
