"""One programming task an episode: programs are run, and the share of tests passed is paid."""

from __future__ import annotations

import random
import secrets
from typing import Any

from ludus.env import Environment, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError, EpisodeStateError, ErrorCode

from ..models import CodeAction, CodeObservation, CodeState
from ..problems import DEFAULT_KINDS, FUNCTION, KINDS, Task, all_programs, draw_task
from ..text import CodingRenderer
from .grading import feedback_on, passed_tests, shown_call
from .programs import Limits, run_program

_OPTIONS = {
    "max_turns": (1, 100),
    "num_tests": (1, 100),
    "num_shown": (0, 100),
    "time_limit_s": (1, 600),
    "memory_mb": (128, 65536),
    "output_kb": (1, 1024),
}
"""By option: the lowest and the highest value."""


class CodingEnvironment(Environment[CodeAction, CodeObservation, CodeState]):
    """A function is asked for; a program that defines it is run and tested.

    The last program's share of passed tests is the reward, all of them a success. What the tests
    expect never reaches the program's process.

    Args:
        kinds: of tasks to draw from, by name; without it, all but those of one line.
        max_turns: how many programs may be tried; the first that passes all ends the episode.
        num_tests: how many calls a program is tested with.
        num_shown: how many of them the task shows.
        time_limit_s: of computing for one program, all its tests together.
        memory_mb: address space of one program, with Python itself.
        output_kb: how much of its stdout, and of its stderr, is kept.

    Raises:
        ConfigError: an option is out of range, or a kind is unknown.
    """

    action_type = CodeAction
    observation_type = CodeObservation
    state_type = CodeState
    name = "coding_env"
    description = "Programming tasks, answered with Python that is run and tested"

    def __init__(
        self,
        max_turns: int = 3,
        num_tests: int = 8,
        num_shown: int = 2,
        time_limit_s: int = 2,
        memory_mb: int = 512,
        output_kb: int = 16,
        *,
        kinds: list[str] | None = None,
    ) -> None:
        self._options = {
            "max_turns": max_turns,
            "num_tests": num_tests,
            "num_shown": num_shown,
            "time_limit_s": time_limit_s,
            "memory_mb": memory_mb,
            "output_kb": output_kb,
        }
        _check(self._options)
        self._kinds = _checked_kinds(kinds)
        self._limits = Limits(time_limit_s, memory_mb << 20, output_kb << 10)
        self._task: Task | None = None
        self._is_asked = False
        self._state = CodeState()
        self.text_renderer = CodingRenderer(all_programs(self._kinds))

    @property
    def options(self) -> JsonObject:
        """What it was built with."""
        return {**self._options, "kinds": list(self._kinds)}

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[CodeObservation]:
        """A new task, which follows from the seed."""
        # A text of its own: players draw from random.Random(seed), too.
        rng = random.Random(f"coding_env {secrets.randbits(63) if seed is None else seed}")
        self._task = draw_task(rng, self._options["num_tests"], self._kinds)
        self._state = CodeState(episode_id=episode_id, problem=self._task.problem)
        self._is_asked = True
        return Transition(self._shown(self._task))

    def step(self, action: CodeAction) -> Transition[CodeObservation]:
        """How the program did; the end of the episode where all tests pass or no try is left.

        Raises:
            EpisodeStateError: nothing is asked, or the episode is over.
            ConfigError: this system cannot confine a program.
            InfrastructureError: the program's process did not come up.
        """
        task = self._task
        if task is None or not self._is_asked:
            raise EpisodeStateError(
                "expected a reset before the program, got a program for no task; call reset",
                ErrorCode.EPISODE_OVER if self._state.step_count else ErrorCode.NOT_RESET,
            )
        ended = run_program(action.code, [test.arguments for test in task.tests], self._limits)
        passed = passed_tests(ended, task.tests)
        self._state.step_count += 1
        self._state.last_exit_code = ended.exit_code
        self._state.num_passed = sum(passed)
        shown = self._shown(task).model_copy(
            update={
                "stdout": ended.stdout,
                "stderr": ended.stderr,
                "exit_code": ended.exit_code,
                "timed_out": ended.timed_out,
                "tests_passed": passed,
                "feedback": feedback_on(ended, task.tests, passed, self._num_shown),
            }
        )
        self._is_asked = not all(passed) and self._state.step_count < self._options["max_turns"]
        if self._is_asked:
            return Transition(shown, 0.0)
        share = sum(passed) / len(passed)
        return Transition(shown, share, terminated=True, success=all(passed))

    @property
    def state(self) -> CodeState:
        """Where the episode stands."""
        return self._state

    @property
    def _num_shown(self) -> int:
        return min(self._options["num_shown"], self._options["num_tests"])

    def _shown(self, task: Task) -> CodeObservation:
        lines = [f"Write a Python function {FUNCTION} that takes one argument and returns"]
        lines[0] += f" {task.text}."
        if self._num_shown:
            lines.append("For example:")
        lines += [f"{shown_call(t)} == {t.expected!r}" for t in task.tests[: self._num_shown]]
        lines.append("Answer with the code alone.")
        return CodeObservation(
            prompt="\n".join(lines), problem=task.problem, parameters=task.parameters
        )


def _check(options: dict[str, int]) -> None:
    for name, value in options.items():
        lowest, highest = _OPTIONS[name]
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number or not lowest <= value <= highest:
            raise ConfigError(
                f"expected {name} as a whole number from {lowest} to {highest}, got {value!r}"
            )


def _checked_kinds(kinds: Any) -> tuple[str, ...]:
    if kinds is None:
        return DEFAULT_KINDS
    listed = kinds if isinstance(kinds, (list, tuple)) else [kinds]
    unknown = [one for one in listed if one not in KINDS]
    if unknown or not listed or listed is not kinds:
        raise ConfigError(
            f"expected kinds as a list of one or more of {', '.join(KINDS)}; got {kinds!r}"
            + (f", where {unknown[0]!r} is none of them" if unknown else "")
        )
    return tuple(kinds)
