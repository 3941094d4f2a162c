"""An environment with one generated question and one answer per episode."""

from __future__ import annotations

import random
import secrets
from typing import Any

from ludus.env import Environment, ReturnRange, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import EpisodeStateError, ErrorCode

from ..generators import NUM_TASKS, Task, TaskGenerator
from ..models import ReasoningGymAction, ReasoningGymObservation, ReasoningGymState
from ..options import ReasoningGymOptions
from ..text import ReasoningGymRenderer

_MIN_SUCCESS_SCORE = 1.0 - 1e-9


class ReasoningGymEnvironment(
    Environment[ReasoningGymAction, ReasoningGymObservation, ReasoningGymState]
):
    """A question of a reasoning-gym generator. The reward is the library's score of the answer.

    An answer with the score 1 is a success.

    Args:
        options: The fields of `ReasoningGymOptions`, and of the generator's configuration.

    Raises:
        NotFoundError: The generator does not exist.
        ConfigError: reasoning-gym is not installed, or an option is invalid.
    """

    action_type = ReasoningGymAction
    observation_type = ReasoningGymObservation
    state_type = ReasoningGymState
    name = "reasoning_gym_env"
    description = "Generated reasoning tasks of reasoning-gym"
    needs_network = False
    # The generators use global random state and evaluate answers, so each session has a confined
    # process.
    one_per_process = True

    def __init__(self, **options: Any) -> None:
        own_names = ReasoningGymOptions.model_fields.keys()
        own_options = {name: value for name, value in options.items() if name in own_names}
        fields = {name: value for name, value in options.items() if name not in own_names}
        parsed_options = ReasoningGymOptions.parse(own_options)
        config = {**parsed_options.config, **fields}
        self._options = parsed_options.model_copy(update={"config": config})
        self._generator = TaskGenerator(self._options.dataset, config)
        self._task: Task | None = None
        self._score: float | None = None
        self._state = ReasoningGymState()
        self.text_renderer = ReasoningGymRenderer(self._options.answer_format)

    @property
    def options(self) -> JsonObject:
        """The options that the environment was built with."""
        return self._options.to_json()

    @property
    def return_range(self) -> ReturnRange:
        """The lowest and the highest score."""
        return ReturnRange(0.0, 1.0)

    @property
    def state(self) -> ReasoningGymState:
        """The state of the current episode."""
        return self._state

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[ReasoningGymObservation]:
        """Generate the task of the seed and return its question."""
        # The text separates these numbers from those of a player who uses random.Random(seed).
        rng = random.Random(f"reasoning_gym {secrets.randbits(63) if seed is None else seed}")
        number = rng.randrange(NUM_TASKS)
        task = self._task = self._generator.make_task(number)
        self._score = None
        self._state = ReasoningGymState(
            episode_id=episode_id,
            dataset=task.dataset,
            task=number,
            correct_answer=task.solution,
        )
        return Transition(self._observe(task))

    def step(self, action: ReasoningGymAction) -> Transition[ReasoningGymObservation]:
        """Score the answer and return the last transition of the episode.

        Raises:
            EpisodeStateError: There is no question, or it was already answered.
        """
        task = self._task
        if task is None or self._score is not None:
            raise EpisodeStateError(
                "there is no question to answer; call reset",
                ErrorCode.NOT_RESET if task is None else ErrorCode.EPISODE_OVER,
            )
        self._score = self._generator.score(action.answer, task)
        self._state.step_count += 1
        return Transition(
            self._observe(task),
            self._score,
            terminated=True,
            success=self._score >= _MIN_SUCCESS_SCORE,
        )

    def _observe(self, task: Task) -> ReasoningGymObservation:
        shows_solution = self._options.shows_solution or self._score is not None
        return ReasoningGymObservation(
            question=task.question,
            dataset=task.dataset,
            score=self._score,
            correct_answer=task.solution if shows_solution else None,
        )
