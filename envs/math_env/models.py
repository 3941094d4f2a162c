"""Messages between a math_env server and its players."""

from __future__ import annotations

from typing import Literal

from ludus.env import Action, Observation, State

Operation = Literal["add", "subtract", "multiply"]


class MathAction(Action):
    """An answer."""

    answer: int
    """Any whole number. A wrong answer is legal and earns 0."""


class MathObservation(Observation):
    """The question."""

    left: int
    """Number before the sign."""
    operation: Operation
    right: int
    """Number after the sign."""
    legal_actions: list[int]
    """All solutions that questions of this environment can have, ascending; empty at the end."""


class MathState(State):
    """State of the episode, hidden from players."""

    solution: int = 0
