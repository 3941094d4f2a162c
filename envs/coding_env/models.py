"""Messages between a coding_env server and its players, with OpenEnv's names."""

from __future__ import annotations

from pydantic import Field

from ludus.env import Action, Observation, State


class CodeAction(Action):
    """A program that defines the requested function."""

    code: str


class CodeObservation(Observation):
    """The task and the result of the last program."""

    prompt: str
    """The task in words; the same in every observation of an episode."""
    problem: str
    """Kind of the task."""
    parameters: dict[str, int]
    """Numbers that the task was drawn with. The prompt contains them too."""
    stdout: str = ""
    stderr: str = ""
    """Output of the program, cut to the environment's limit."""
    exit_code: int = 0
    """Exit code of the program; negative if a signal killed it."""
    timed_out: bool = False
    tests_passed: list[bool] = Field(default_factory=list)
    """Result of each test; empty before the first program."""
    feedback: str = ""
    """Summary of the last program's result; empty before the first program."""


class CodeState(State):
    """State of the episode, hidden from players."""

    last_exit_code: int = 0
    problem: str = ""
    num_passed: int = 0
