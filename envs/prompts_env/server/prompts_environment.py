"""One row of a data set an episode: its prompt is shown, and an answer ends it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from ludus.env import Environment, Message, TaskSet, Transition
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError, EpisodeStateError, ErrorCode
from ludus.proto.seeds import FIRST_EVAL_SEED

from ..data.opening import DataSource, open_tasks
from ..data.prompt_format import PromptFormat, require_column
from ..data.rows import Rows
from ..data.tasks import Task, Tasks
from ..models import PromptMessage, PromptsAction, PromptsObservation, PromptsState
from ..text import PromptsRenderer

_MAX_EXAMPLES = 32
_NUM_ROWS_FOR_EXAMPLES = 256
_RETRY_PROMPT = "That is not right. Try again."


class PromptsEnvironment(Environment[PromptsAction, PromptsObservation, PromptsState]):
    """Rows of a data set as tasks; what an answer is worth, reward functions say.

    Every result's `info` is the row, so its columns reach reward functions by their names.

    Args:
        path: .jsonl, .ndjson, .json, .csv, .parquet, or a folder that `save_to_disk` wrote.
        prompt: the column that is shown: text, or a list of messages.
        template: text with {columns} in braces, which is shown in place of `prompt`.
        system_prompt: a system message before it.
        answer: the column with the right answer. An answer that equals it, but for space around,
            is worth 1 and a success, any other 0; without it every answer is worth 0.
        answer_pattern: a regular expression with one group, which holds the answer in what is
            said; the last match counts, and without one the answer is wrong.
        max_turns: how often a wrong answer may be given again; more than 1 takes `answer`.
        retry_prompt: what is said of a wrong answer then.
        example_answers: what answers may look like, for the warm start of a tiny model: a list,
            or the column that holds one or more. Without it, answers of other rows.
        split: which split of a folder with several to train on.
        test_path: where the rows of the test are, if not among those of `path`.
        test_split: their split, of `test_path` or else of `path`.
        test_size: how many rows of `path` are held back: a share below 1, or a number.
        seed: of the split, and of the order in each epoch.

    Raises:
        ConfigError: the data cannot be read, a row is faulty, or the options do not fit it.
    """

    action_type = PromptsAction
    observation_type = PromptsObservation
    state_type = PromptsState
    name = "prompts_env"
    description = "Rows of a data set, one prompt and one answer an episode"
    steps_on_event_loop = True

    def __init__(
        self,
        path: str,
        *,
        prompt: str = "prompt",
        template: str | None = None,
        system_prompt: str | None = None,
        answer: str | None = None,
        answer_pattern: str | None = None,
        max_turns: int = 1,
        retry_prompt: str = _RETRY_PROMPT,
        example_answers: list[str] | str | None = None,
        split: str | None = None,
        test_path: str | None = None,
        test_split: str | None = None,
        test_size: float = 0,
        seed: int = 0,
    ) -> None:
        source = DataSource(str(path), split, test_path, test_split, test_size, seed)
        if source.has_test_of_its_own and test_size:
            raise ConfigError(
                f"test_size = {test_size} and a test of its own (test_path, test_split): expected "
                "one of them; remove the other"
            )
        _check_turns(max_turns, answer)
        self._format = PromptFormat(prompt, template, system_prompt)
        self._tasks: Tasks = open_tasks(source, self._format)
        columns = self._tasks.rows.columns
        self._format.check_columns(columns)
        if answer is not None:
            require_column("answer", answer, columns)
        if isinstance(example_answers, str):
            require_column("example_answers", example_answers, columns)
        self._answer = answer
        self._pattern = _compiled(answer_pattern, answer)
        self._max_turns = max_turns
        self._retry_prompt = retry_prompt
        self._given_examples = example_answers
        self._options: JsonObject = {
            "path": source.path,
            "prompt": template or prompt,
            "answer": answer,
            "answer_pattern": answer_pattern,
            "max_turns": max_turns,
            "test_size": test_size,
            "seed": seed,
        }
        self._row: JsonObject = {}
        self._is_asked = False
        self._state = PromptsState()
        self.text_renderer = PromptsRenderer(self._examples)

    @property
    def options(self) -> JsonObject:
        """What it was built with."""
        return self._options

    @property
    def tasks(self) -> TaskSet:
        """The rows for training, those held back, and their columns."""
        return self._tasks.described

    def reset(  # type: ignore[override]  # names its options, so that others are refused
        self, *, seed: int | None = None, episode_id: str | None = None
    ) -> Transition[PromptsObservation]:
        """The prompt of the row that the seed stands for; without one, any row of training."""
        task = self._tasks.of_seed(secrets.randbelow(FIRST_EVAL_SEED) if seed is None else seed)
        return self._begin(task, episode_id)

    def step(self, action: PromptsAction) -> Transition[PromptsObservation]:
        """The end of the episode, or the same prompt once more after a wrong answer.

        Raises:
            EpisodeStateError: nothing is asked, or it has been answered.
        """
        if not self._is_asked:
            raise EpisodeStateError(
                "expected a reset before the answer, got an answer to no prompt; call reset",
                ErrorCode.EPISODE_OVER if self._state.step_count else ErrorCode.NOT_RESET,
            )
        self._state.step_count += 1
        is_right = self._judge(action.text)
        if is_right is False and self._state.step_count < self._max_turns:
            return Transition(_said(self._retry_prompt), 0.0, info=self._row)
        self._is_asked = False
        return Transition(
            _said("over"), float(is_right or 0.0), terminated=True, info=self._row, success=is_right
        )

    @property
    def state(self) -> PromptsState:
        """Where the episode stands."""
        return self._state

    def _begin(self, task: Task, episode_id: str | None) -> Transition[PromptsObservation]:
        self._row = task.rows[task.row]
        self._state = PromptsState(episode_id=episode_id, split=task.split, row=task.row)
        self._is_asked = True
        return Transition(_shown(self._format.messages(self._row)), info=self._row)

    def _judge(self, text: str) -> bool | None:
        """Whether the answer is right; None where nobody says what is."""
        if self._answer is None:
            return None
        if self._pattern is not None:
            found = self._pattern.findall(text)
            if not found:
                return False
            text = found[-1]
        return text.strip() == _as_text(self._row[self._answer])

    def _examples(self) -> list[str]:
        if not self._is_asked:
            return []
        given = self._given_examples
        if isinstance(given, list):
            return given
        if isinstance(given, str):
            value = self._row[given]
            return [_as_text(one) for one in (value if isinstance(value, list) else [value])]
        return [] if self._answer is None else _answers_of(self._tasks.rows, self._answer)


def _said(text: str) -> PromptsObservation:
    return _shown([{"role": "user", "content": text}])


def _shown(messages: Sequence[Message]) -> PromptsObservation:
    return PromptsObservation(messages=[PromptMessage(**message) for message in messages])


def _as_text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else str(value)


def _answers_of(rows: Rows, column: str) -> list[str]:
    """Some of the answers of a data set; the first rows', which are as good as any."""
    some = (_as_text(rows[row][column]) for row in range(min(len(rows), _NUM_ROWS_FOR_EXAMPLES)))
    return list(dict.fromkeys(some))[:_MAX_EXAMPLES]


def _compiled(pattern: str | None, answer: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"answer_pattern = {pattern!r} is no regular expression: {error}"
        ) from None
    if compiled.groups != 1 or answer is None:
        raise ConfigError(
            f"answer_pattern = {pattern!r} expected one group, which holds the answer, and answer, "
            f"the column with the right one; got {compiled.groups} and answer = {answer!r}"
        )
    return compiled


def _check_turns(max_turns: int, answer: str | None) -> None:
    if not isinstance(max_turns, int) or isinstance(max_turns, bool) or max_turns < 1:
        raise ConfigError(f"expected max_turns of at least 1, got {max_turns!r}")
    if max_turns > 1 and answer is None:
        raise ConfigError(
            f"max_turns = {max_turns} lets a wrong answer be given again, and nothing says what is "
            "wrong; set answer to the column with the right one, or max_turns = 1"
        )
