"""What travels between a server of arithmetic and its players."""

from __future__ import annotations

from typing import Literal

from ludus.env import Action, Observation, State

Operation = Literal["add", "subtract", "multiply"]


class MathAction(Action):
    """An answer."""

    answer: int
    """Any whole number: one that is wrong is legal, and worth nothing."""


class MathObservation(Observation):
    """The question."""

    left: int
    operation: Operation
    right: int
    legal_actions: list[int]
    """What an answer to any question of this environment can be, ascending; empty at the end."""


class MathState(State):
    """Where the episode stands; players do not see it."""

    solution: int = 0
