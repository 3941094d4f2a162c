"""An environment with one arithmetic question and one answer per episode."""

from __future__ import annotations

import random
import secrets
from typing import Any

from ludus.env import Environment, ReturnRange, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import EpisodeStateError, ErrorCode

from ..arithmetic import OPERATIONS
from ..models import MathAction, MathObservation, MathState
from ..options import MathOptions
from ..text import MathRenderer


class MathEnvironment(Environment[MathAction, MathObservation, MathState]):
    """Two numbers to add, subtract or multiply. The reward is 1 for the right answer, otherwise 0.

    All pairs of numbers are equally likely. Subtraction puts the larger number of a pair first.

    Args:
        options: The fields of `MathOptions`.

    Raises:
        ConfigError: An option is invalid.
    """

    action_type = MathAction
    observation_type = MathObservation
    state_type = MathState
    name = "math_env"
    description = "Arithmetic on two numbers, one question per episode"
    needs_network = False
    steps_on_event_loop = True

    def __init__(self, **options: Any) -> None:
        self._options = MathOptions.parse(options)
        self._answers = list(range(self._options.num_answers))
        self._question = (0, 0)
        self._awaits_answer = False
        """True while the question waits for its answer."""
        self._state = MathState()
        self.text_renderer = MathRenderer()

    @property
    def options(self) -> JsonObject:
        """The options that the environment was built with."""
        return self._options.to_json()

    @property
    def return_range(self) -> ReturnRange:
        """The returns of a wrong and a right answer."""
        return ReturnRange(0.0, 1.0)

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[MathObservation]:
        """Draw a question from the seed and return it."""
        # The text separates these numbers from those of a player who uses random.Random(seed).
        rng = random.Random(f"math_env {secrets.randbits(63) if seed is None else seed}")
        limit, arithmetic = self._options.limit, OPERATIONS[self._options.operation]
        numbers = [rng.randrange(limit), rng.randrange(limit)]
        if arithmetic.puts_larger_first:
            numbers.sort(reverse=True)
        self._question = numbers[0], numbers[1]
        solution = arithmetic.compute_solution(*self._question)
        self._state = MathState(episode_id=episode_id, solution=solution)
        self._awaits_answer = True
        return Transition(self._observe())

    def step(self, action: MathAction) -> Transition[MathObservation]:
        """Grade the answer and return the last transition of the episode.

        Raises:
            EpisodeStateError: There is no question, or it was already answered.
        """
        if not self._awaits_answer:
            raise EpisodeStateError(
                "there is no question to answer; call reset",
                ErrorCode.EPISODE_OVER if self._state.step_count else ErrorCode.NOT_RESET,
            )
        self._awaits_answer = False
        self._state.step_count += 1
        is_right = action.answer == self._state.solution
        return Transition(self._observe(), float(is_right), terminated=True, success=is_right)

    @property
    def state(self) -> MathState:
        """The state of the current episode."""
        return self._state

    def _observe(self) -> MathObservation:
        first, second = self._question
        return MathObservation(
            left=first,
            operation=self._options.operation,
            right=second,
            legal_actions=self._answers if self._awaits_answer else [],
        )
