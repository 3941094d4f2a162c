"""One question of arithmetic an episode, and one answer."""

from __future__ import annotations

import random
import secrets

from ludus.env import Environment, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError, EpisodeStateError, ErrorCode

from ..arithmetic import OPERATIONS
from ..models import MathAction, MathObservation, MathState, Operation
from ..text import MathRenderer

_MAX_ANSWERS = 10_000
"""Every observation lists them all."""


class MathEnvironment(Environment[MathAction, MathObservation, MathState]):
    """Two numbers to add, subtract or multiply; the right answer is worth 1, any other 0.

    Questions are equally likely, but for subtraction, where the larger number comes first.

    Args:
        operation: add, subtract or multiply.
        limit: the numbers are 0 to this one less 1; the larger, the harder.

    Raises:
        ConfigError: there is no such operation, or the limit is too small or too large for it.
    """

    action_type = MathAction
    observation_type = MathObservation
    state_type = MathState
    name = "math_env"
    description = "Arithmetic on two numbers, one question an episode"
    steps_on_event_loop = True

    def __init__(self, operation: Operation = "add", limit: int = 20) -> None:
        if operation not in OPERATIONS:
            raise ConfigError(
                f"expected an operation out of {', '.join(OPERATIONS)}, got {operation!r}; set "
                "operation to one of them"
            )
        self._arithmetic = OPERATIONS[operation]
        if not isinstance(limit, int) or limit < 2:
            raise ConfigError(f"expected a limit of at least 2, got {limit!r}; set limit to 20")
        num_answers = self._arithmetic.highest(limit) + 1
        if num_answers > _MAX_ANSWERS:
            raise ConfigError(
                f"expected a limit with at most {_MAX_ANSWERS:,} possible answers, got {limit}, "
                f"with which {operation!r} has {num_answers:,}; lower the limit"
            )
        self._operation: Operation = operation
        self._limit = limit
        self._answers = list(range(num_answers))
        self._question = (0, 0)
        self._is_asked = False
        self._state = MathState()
        self.text_renderer = MathRenderer()

    @property
    def options(self) -> JsonObject:
        """What it was built with."""
        return {"operation": self._operation, "limit": self._limit}

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[MathObservation]:
        """A new question, which follows from the seed."""
        # A text of its own: players draw from random.Random(seed), too.
        numbers = random.Random(f"math_env {secrets.randbits(63) if seed is None else seed}")
        left, right = numbers.randrange(self._limit), numbers.randrange(self._limit)
        if self._arithmetic.larger_first and left < right:
            left, right = right, left
        self._question = left, right
        self._state = MathState(episode_id=episode_id, solution=self._arithmetic.solve(left, right))
        self._is_asked = True
        return Transition(self._observe())

    def step(self, action: MathAction) -> Transition[MathObservation]:
        """The end of the episode: a reward of 1 for the right answer, else 0.

        Raises:
            EpisodeStateError: there is no question, or it has been answered.
        """
        if not self._is_asked:
            raise EpisodeStateError(
                "expected a reset before the answer, got an answer to no question; call reset",
                ErrorCode.EPISODE_OVER if self._state.step_count else ErrorCode.NOT_RESET,
            )
        self._is_asked = False
        self._state.step_count += 1
        is_right = action.answer == self._state.solution
        return Transition(self._observe(), float(is_right), terminated=True, success=is_right)

    @property
    def state(self) -> MathState:
        """Where the episode stands."""
        return self._state

    def _observe(self) -> MathObservation:
        left, right = self._question
        return MathObservation(
            left=left,
            operation=self._operation,
            right=right,
            legal_actions=self._answers if self._is_asked else [],
        )
