"""Problems whose solution is a number: of a data set, or sums that need none.

Columns are question (or problem, prompt) and answer (or solution); an answer that explains itself
and ends in "#### 42", as those of GSM8K do, is 42.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.gymformer.env.rewards import number_in
from ludus.trainer.core.streams import Stream, make_random
from ludus.trainer.reward_model.rows import read_rows

_QUESTIONS = ("question", "problem", "prompt")
_SOLUTIONS = ("answer", "solution")
_BEFORE_SOLUTION = "####"


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, and the number that answers it."""

    question: str
    solution: float


@dataclass(frozen=True, slots=True)
class Split:
    """Problems to learn from, and others to be judged by."""

    train: tuple[Problem, ...]
    test: tuple[Problem, ...]

    @classmethod
    def of(cls, problems: Sequence[Problem], test_share: float, seed: int) -> Split:
        """The problems in two; those of one question stay together.

        Raises:
            ConfigError: nothing would be left to learn from.
        """
        if not 0 <= test_share < 1:
            raise ConfigError(f"expected a test_split from 0 to below 1, got {test_share}")
        questions = list(dict.fromkeys(problem.question for problem in problems))
        make_random(seed, Stream.PROBLEM_SPLIT).shuffle(questions)
        held_back = set(questions[: round(test_share * len(questions))])
        train = tuple(one for one in problems if one.question not in held_back)
        if not train:
            raise ConfigError(
                f"test_split = {test_share} of {len(questions)} questions leaves none to learn "
                "from; lower it, or bring more"
            )
        return cls(train, tuple(one for one in problems if one.question in held_back))


def sums_below(limit: int) -> list[Problem]:
    """All sums of two and three whole numbers from 0 that stay below `limit`: "3+4"."""
    return [
        Problem("+".join(map(str, numbers)), float(sum(numbers)))
        for count in (2, 3)
        for numbers in itertools.product(range(limit), repeat=count)
        if sum(numbers) < limit
    ]


def read_problems(path: Path) -> list[Problem]:
    """The problems of a file or a folder.

    Raises:
        NotFoundError: there is nothing.
        ConfigError: a row lacks a column, or its answer is no number.
    """
    problems = list(_problems_of(path))
    if not problems:
        raise ConfigError(f"data set '{path}' expected at least one row, got none")
    return problems


def _problems_of(path: Path) -> Iterator[Problem]:
    for row in read_rows(path):
        question = _column(row.values, _QUESTIONS, row.location)
        said = str(_column(row.values, _SOLUTIONS, row.location))
        solution = number_in(said.rpartition(_BEFORE_SOLUTION)[2].strip())
        if solution is None:
            raise ConfigError(
                f"{row.location}: expected an answer that is a number, got {said!r:.80}"
            )
        yield Problem(str(question), solution)


def _column(values: Mapping[str, Any], names: Sequence[str], place: str) -> Any:
    for name in names:
        if values.get(name) is not None:
            return values[name]
    raise ConfigError(
        f"{place}: expected one of the columns {', '.join(names)}, got {', '.join(values)}"
    )
