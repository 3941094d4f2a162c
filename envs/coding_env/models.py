"""What travels between a server of programming tasks and its players; OpenEnv's names."""

from __future__ import annotations

from pydantic import Field

from ludus.env import Action, Observation, State


class CodeAction(Action):
    """A program that defines the function which is asked for."""

    code: str


class CodeObservation(Observation):
    """The task, and how the last program did."""

    prompt: str
    """The task in words; the same in every observation of an episode."""
    problem: str
    """Which kind of task it is."""
    parameters: dict[str, int]
    """The numbers that the task was drawn with; the prompt says them, too."""
    stdout: str = ""
    stderr: str = ""
    """What the program wrote, cut to the environment's limit."""
    exit_code: int = 0
    """As the system says it; negative where a signal ended the program."""
    timed_out: bool = False
    tests_passed: list[bool] = Field(default_factory=list)
    """By test; empty before the first program."""
    feedback: str = ""
    """What is said of the last program; empty before the first."""


class CodeState(State):
    """Where the episode stands; players do not see it."""

    last_exit_code: int = 0
    problem: str = ""
    num_passed: int = 0
    """Tests that the last program has passed."""
