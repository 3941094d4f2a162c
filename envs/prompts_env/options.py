"""Options of the prompts environment."""

from __future__ import annotations

import os
import re
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from ludus.env.options import EnvironmentOptions


def _convert_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _convert_path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


DataPath = Annotated[str, BeforeValidator(_convert_path)]


class PromptsOptions(EnvironmentOptions):
    """A data set, the prompt and the answer of a row, and the split for the test."""

    path: DataPath
    """File (`.jsonl`, `.ndjson`, `.csv`, `.json` or `.parquet`), or a folder written by
    `save_to_disk` of Hugging Face's `datasets`. Required."""
    prompt: str = "prompt"
    """Column with the prompt: text, or a list of messages (`role`, `content`)."""
    template: str | None = None
    """Text with column names in braces, used instead of `prompt`: `{question} Answer in one
    word.`"""
    system_prompt: str | None = None
    """System message before the prompt."""
    answer: str | None = None
    """Column with the right answer. A response that equals it, ignoring surrounding whitespace,
    earns 1 and is a success; any other earns 0. If not set, every response earns 0 and success is
    not reported."""
    answer_pattern: str | None = None
    """Regular expression whose one group extracts the answer from a response, for example
    `<final_answer>(.*?)</final_answer>`. The last match counts; without a match the response is
    wrong."""
    max_turns: int = Field(1, ge=1)
    """Maximum number of responses per episode. More than 1 requires `answer`."""
    retry_prompt: str = "That is not right. Try again."
    """Message after a wrong response that is not the last one."""
    example_answers: Annotated[tuple[str, ...] | str | None, BeforeValidator(_convert_list)] = None
    """Example responses: a list, or the column with one or more of them. The warm start of a tiny
    model learns their format. If not set, the answers of other rows are used."""
    split: str | None = None
    """Split of the folder to train on, if the folder has several."""
    test_path: str | None = None
    """File or folder with the test rows, if they are not in `path`."""
    test_split: str | None = None
    """Split with the test rows. It is in `test_path` if that is set, otherwise in `path`."""
    test_size: float = Field(0, ge=0)
    """Rows of `path` to keep for the test: a share below 1, or a number of rows."""
    seed: int = 0
    """Seed of the train-test split and of the order of rows in each epoch."""

    @model_validator(mode="after")
    def _check_test(self) -> Self:
        if self.has_separate_test and self.test_size:
            raise ValueError(
                "test_size cannot be combined with test_path or test_split, got test_size ="
                f" {self.test_size:g}; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_answer(self) -> Self:
        if self.max_turns > 1 and self.answer is None:
            raise ValueError(
                f"max_turns must be 1 without answer, got {self.max_turns}: no response is known"
                " to be wrong; set answer to the column with the right answer"
            )
        if self.answer_pattern is None:
            return self
        try:
            num_groups = re.compile(self.answer_pattern).groups
        except re.error as error:
            raise ValueError(
                f"answer_pattern must be a regular expression, got {self.answer_pattern!r}: {error}"
            ) from None
        if num_groups != 1 or self.answer is None:
            raise ValueError(
                "answer_pattern needs exactly one group, which extracts the answer, and answer, the"
                f" column with the right answer; got {num_groups} groups in"
                f" {self.answer_pattern!r} and answer = {self.answer!r}"
            )
        return self

    @property
    def has_separate_test(self) -> bool:
        """True if the test rows are not among the training rows."""
        return self.test_path is not None or self.test_split is not None

    @cached_property
    def compiled_answer_pattern(self) -> re.Pattern[str] | None:
        """The answer pattern, compiled."""
        return None if self.answer_pattern is None else re.compile(self.answer_pattern, re.DOTALL)
