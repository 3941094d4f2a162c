"""Problems whose solution is a number, from a data set or generated as sums.

The columns of a data set are question (or problem, prompt) and answer (or solution). In an answer
with an explanation, as in GSM8K, the solution follows "####": "... #### 42" has solution 42.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.gymformer.env.rewards import parse_number
from ludus.trainer.core.streams import Stream, make_random
from ludus.trainer.reward_model.rows import read_rows

_QUESTION_COLUMNS = ("question", "problem", "prompt")
_SOLUTION_COLUMNS = ("answer", "solution")
_SOLUTION_MARK = "####"


@dataclass(frozen=True, slots=True)
class NumberProblem:
    """A question whose answer is a number."""

    question: str
    solution: float


@dataclass(frozen=True, slots=True)
class ProblemSplit:
    """Training problems and test problems."""

    train: tuple[NumberProblem, ...]
    test: tuple[NumberProblem, ...]

    @classmethod
    def make(cls, problems: Sequence[NumberProblem], test_share: float, seed: int) -> ProblemSplit:
        """Split the problems; problems with the same question stay together.

        Raises:
            ConfigError: there would be no training problems.
        """
        if not 0 <= test_share < 1:
            raise ConfigError(f"test_split must be at least 0 and below 1, got {test_share}")
        questions = list(dict.fromkeys(problem.question for problem in problems))
        make_random(seed, Stream.PROBLEM_SPLIT).shuffle(questions)
        test_questions = set(questions[: round(test_share * len(questions))])
        train = tuple(problem for problem in problems if problem.question not in test_questions)
        if not train:
            raise ConfigError(
                f"test_split = {test_share} of {len(questions)} questions leaves no training "
                "problems; lower test_split, or add questions"
            )
        test = tuple(problem for problem in problems if problem.question in test_questions)
        return cls(train, test)


def sums_below(limit: int) -> list[NumberProblem]:
    """Return all sums of two or three integers from 0, such as "3+4", that are below `limit`."""
    return [
        NumberProblem("+".join(map(str, numbers)), float(sum(numbers)))
        for count in (2, 3)
        for numbers in itertools.product(range(limit), repeat=count)
        if sum(numbers) < limit
    ]


def read_problems(path: Path) -> list[NumberProblem]:
    """Return the problems in a file or a folder.

    Raises:
        NotFoundError: the path does not exist.
        ConfigError: a row has no question or solution, or its solution is not a number.
    """
    problems = list(_iterate_problems(path))
    if not problems:
        raise ConfigError(f"data set '{path}' has no rows; add at least one")
    return problems


def _iterate_problems(path: Path) -> Iterator[NumberProblem]:
    for row in read_rows(path):
        question = _column(row.values, _QUESTION_COLUMNS, row.location)
        answer = str(_column(row.values, _SOLUTION_COLUMNS, row.location))
        solution = parse_number(answer.rpartition(_SOLUTION_MARK)[2].strip())
        if solution is None:
            raise ConfigError(f"{row.location}: the answer must be a number, got {answer!r:.80}")
        yield NumberProblem(str(question), solution)


def _column(values: Mapping[str, Any], names: Sequence[str], location: str) -> Any:
    for name in names:
        if values.get(name) is not None:
            return values[name]
    raise ConfigError(
        f"{location}: one of the columns {', '.join(names)} is needed, got {', '.join(values)}"
    )
