"""An environment with one programming task per episode; programs are run and tested."""

from __future__ import annotations

import random
import secrets
from typing import Any

from ludus.env import Environment, ReturnRange, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import EpisodeStateError, ErrorCode

from ..models import CodeAction, CodeObservation, CodeState
from ..options import CodingOptions
from ..problems import FUNCTION_NAME, CodingTask, draw_task, list_solutions
from ..text import CodingRenderer
from .grading import grade, write_call, write_feedback
from .programs import ProgramLimits, run_program


class CodingEnvironment(Environment[CodeAction, CodeObservation, CodeState]):
    """Programming tasks. Each asks for a function; programs that define it are run and tested.

    The reward is the share of tests that the last program passed. The episode is a success if all
    tests passed. The program's process never gets the expected values.

    Args:
        options: The fields of `CodingOptions`.

    Raises:
        ConfigError: An option is invalid.
    """

    action_type = CodeAction
    observation_type = CodeObservation
    state_type = CodeState
    name = "coding_env"
    description = "Programming tasks, answered with Python that is run and tested"
    needs_network = False

    def __init__(self, **options: Any) -> None:
        self._options = CodingOptions.parse(options)
        self._limits = ProgramLimits(
            self._options.time_limit_s,
            self._options.memory_mb << 20,
            self._options.output_kb << 10,
        )
        self._num_shown = min(self._options.num_shown, self._options.num_tests)
        self._task: CodingTask | None = None
        """Task of the current episode; None without an episode."""
        self._state = CodeState()
        self.text_renderer = CodingRenderer(list_solutions(self._options.kinds))

    @property
    def options(self) -> JsonObject:
        """The options that the environment was built with."""
        return self._options.to_json()

    @property
    def return_range(self) -> ReturnRange:
        """The returns of programs that pass no test and all tests."""
        return ReturnRange(0.0, 1.0)

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[CodeObservation]:
        """Draw a task from the seed and return it."""
        # The text separates these numbers from those of a player who uses random.Random(seed).
        rng = random.Random(f"coding_env {secrets.randbits(63) if seed is None else seed}")
        self._task = draw_task(rng, self._options.num_tests, self._options.kinds)
        self._state = CodeState(episode_id=episode_id, problem=self._task.problem)
        return Transition(self._observe(self._task))

    def step(self, action: CodeAction) -> Transition[CodeObservation]:
        """Run and test the program.

        The episode terminates if all tests pass or if this was the last program allowed.

        Raises:
            EpisodeStateError: There is no episode, or it is over.
            ConfigError: This system cannot sandbox a program.
            InfrastructureError: The program's process did not start.
        """
        task = self._task
        if task is None:
            raise EpisodeStateError(
                "there is no task for the program; call reset",
                ErrorCode.EPISODE_OVER if self._state.step_count else ErrorCode.NOT_RESET,
            )
        result = run_program(action.code, [test.arguments for test in task.tests], self._limits)
        passed_tests = grade(result, task.tests)
        self._state.step_count += 1
        self._state.last_exit_code = result.exit_code
        self._state.num_passed = sum(passed_tests)
        observation = self._observe(task).model_copy(
            update={
                "stdout": result.stdout,
                "stderr": result.stderr,
                "exit_code": result.exit_code,
                "timed_out": result.timed_out,
                "tests_passed": passed_tests,
                "feedback": write_feedback(result, task.tests, passed_tests, self._num_shown),
            }
        )
        if not all(passed_tests) and self._state.step_count < self._options.max_turns:
            return Transition(observation, 0.0)
        self._task = None
        reward = sum(passed_tests) / len(passed_tests)
        return Transition(observation, reward, terminated=True, success=all(passed_tests))

    @property
    def state(self) -> CodeState:
        """The state of the current episode."""
        return self._state

    def _observe(self, task: CodingTask) -> CodeObservation:
        lines = [
            f"Write a Python function {FUNCTION_NAME} that takes one argument and returns "
            f"{task.text}."
        ]
        if self._num_shown:
            lines.append("For example:")
        for test in task.tests[: self._num_shown]:
            lines.append(f"{write_call(test)} == {test.expected_value!r}")
        lines.append("Answer with the code alone.")
        return CodeObservation(
            prompt="\n".join(lines), problem=task.problem, parameters=task.parameters
        )
