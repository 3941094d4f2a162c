"""Messages between a reasoning_gym_env server and its players."""

from __future__ import annotations

from ludus.env import Action, Observation, State


class ReasoningGymAction(Action):
    """An answer: any text."""

    answer: str


class ReasoningGymObservation(Observation):
    """A question, or the score of its answer."""

    question: str
    dataset: str
    """Generator of the question."""
    score: float | None = None
    """Score of the answer, from 0 to 1; None before the answer."""
    correct_answer: str | None = None
    """A solution; None before the answer, unless the option `shows_solution` is set, and for
    generators that know no solution."""


class ReasoningGymState(State):
    """State of the episode, hidden from players."""

    dataset: str = ""
    task: int = -1
    """Number of the task in its generator; -1 before the first reset."""
    correct_answer: str | None = None
