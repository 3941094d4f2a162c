"""An environment with one row of a data set per episode: a prompt and its responses."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ludus.env import Environment, Message, TaskSet, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import EpisodeStateError, ErrorCode
from ludus.proto.seeds import FIRST_EVAL_SEED

from ..data.prompt_format import PromptFormat, require_column
from ..data.row_tasks import RowTask, RowTasks
from ..data.rows import Rows
from ..data.source import open_tasks
from ..models import PromptMessage, PromptsAction, PromptsObservation, PromptsState
from ..options import PromptsOptions
from ..text import PromptsRenderer

_MAX_EXAMPLES = 32
_NUM_ROWS_FOR_EXAMPLES = 256


class PromptsEnvironment(Environment[PromptsAction, PromptsObservation, PromptsState]):
    """Rows of a data set as tasks. Usually reward functions score the responses.

    The `info` of every result is the row, so reward functions get each column by its name.

    Args:
        options: The fields of `PromptsOptions`.

    Raises:
        ConfigError: The data set is not readable, a row is invalid, or an option is invalid.
    """

    action_type = PromptsAction
    observation_type = PromptsObservation
    state_type = PromptsState
    name = "prompts_env"
    description = "Rows of a data set, one prompt per episode"
    steps_on_event_loop = True

    def __init__(self, **options: Any) -> None:
        self._options = PromptsOptions.parse(options)
        self._prompt_format = PromptFormat(
            self._options.prompt, self._options.template, self._options.system_prompt
        )
        self._tasks: RowTasks = open_tasks(self._options, self._prompt_format)
        columns = self._tasks.rows.columns
        if self._options.answer is not None:
            require_column("answer", self._options.answer, columns)
        if isinstance(self._options.example_answers, str):
            require_column("example_answers", self._options.example_answers, columns)
        self._row: JsonObject = {}
        self._awaits_response = False
        """True while the prompt waits for a response."""
        self._state = PromptsState()
        self.text_renderer = PromptsRenderer(self._list_example_answers)

    @property
    def options(self) -> JsonObject:
        """The options that the environment was built with."""
        return self._options.to_json()

    @property
    def tasks(self) -> TaskSet:
        """The numbers of training and test rows, and their columns."""
        return self._tasks.task_set

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[PromptsObservation]:
        """Return the prompt of the seed's row. Without a seed, the row is a random training row."""
        task: RowTask = self._tasks.find_task(
            secrets.randbelow(FIRST_EVAL_SEED) if seed is None else seed
        )
        self._row = task.rows[task.row]
        self._state = PromptsState(episode_id=episode_id, split=task.split, row=task.row)
        self._awaits_response = True
        return Transition(
            _make_observation(self._prompt_format.make_messages(self._row)), info=self._row
        )

    def step(self, action: PromptsAction) -> Transition[PromptsObservation]:
        """Grade the response. The episode ends unless the response is wrong and turns remain.

        Raises:
            EpisodeStateError: There is no episode, or it is over.
        """
        if not self._awaits_response:
            raise EpisodeStateError(
                "there is no prompt to respond to; call reset",
                ErrorCode.EPISODE_OVER if self._state.step_count else ErrorCode.NOT_RESET,
            )
        self._state.step_count += 1
        is_right = self._grade(action.text)
        if is_right is False and self._state.step_count < self._options.max_turns:
            return Transition(
                _make_text_observation(self._options.retry_prompt), 0.0, info=self._row
            )
        self._awaits_response = False
        return Transition(
            _make_text_observation("over"),
            float(is_right or 0.0),
            terminated=True,
            info=self._row,
            success=is_right,
        )

    @property
    def state(self) -> PromptsState:
        """The state of the current episode."""
        return self._state

    def _grade(self, text: str) -> bool | None:
        """Return whether the response is right; None if the right answer is not known."""
        if self._options.answer is None:
            return None
        pattern = self._options.compiled_answer_pattern
        if pattern is not None:
            matches = pattern.findall(text)
            if not matches:
                return False
            text = matches[-1]
        return text.strip() == _format_value(self._row[self._options.answer])

    def _list_example_answers(self) -> list[str]:
        if not self._awaits_response:
            return []
        examples = self._options.example_answers
        if isinstance(examples, tuple):
            return list(examples)
        if isinstance(examples, str):
            column_value = self._row[examples]
            example_values = column_value if isinstance(column_value, list) else [column_value]
            return [_format_value(example) for example in example_values]
        answer = self._options.answer
        return [] if answer is None else _list_first_answers(self._tasks.rows, answer)


def _make_observation(messages: Sequence[Message]) -> PromptsObservation:
    return PromptsObservation(messages=[PromptMessage(**message) for message in messages])


def _make_text_observation(text: str) -> PromptsObservation:
    return _make_observation([{"role": "user", "content": text}])


def _format_value(value: Any) -> str:
    return value.strip() if isinstance(value, str) else str(value)


def _list_first_answers(rows: Rows, column: str) -> list[str]:
    """Return distinct answers from the first rows of a data set."""
    num_rows = min(len(rows), _NUM_ROWS_FOR_EXAMPLES)
    answers = (_format_value(rows[row][column]) for row in range(num_rows))
    return list(dict.fromkeys(answers))[:_MAX_EXAMPLES]
