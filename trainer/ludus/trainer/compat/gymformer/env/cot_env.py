"""An environment of math problems that are solved by a chain of thought.

A completion must contain <final_answer>x</final_answer>. Its reward is -|x - y| for the solution y,
-5 if x is not a number, and -10 without the tags. The token limit ends the episode like an EOS
token: an unfinished completion gets its reward, and the episode counts as terminated.

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
from ludus.trainer.compat.checks import PathText, ShareBelow1, check_value, rename_in_errors
from ludus.trainer.compat.gymformer.env.rewards import distance_to_answer, parse_number
from ludus.trainer.compat.gymformer.env.token_env import TokenEnv
from ludus.trainer.core.streams import Stream, make_random
from ludus.trainer.data.rows import read_rows

_QUESTION_COLUMNS = ("question", "problem", "prompt")
_SOLUTION_COLUMNS = ("answer", "solution")
_SOLUTION_MARK = "####"
_SUM_LIMIT = 10
_INSTRUCTION = (
    "Solve the problem step by step. Think between <think> and </think>, then give the number "
    "between <final_answer> and </final_answer>.\n\nProblem: {question}\n"
)


@dataclass(frozen=True, slots=True)
class NumberProblem:
    """A question whose answer is a number."""

    question: str
    solution: float


class CoTEnv(TokenEnv):
    """An environment of problems whose solution is a number; each step takes one token.

    Args:
        model_name: Hugging Face id or folder of the tokenizer.
        dataset_path: file or folder of problems (columns: see above). None uses sums of small
            integers.
        max_generation: maximum number of tokens per completion, including the thoughts.
        seed: seed of the split, and of the first episode if `reset` gets no seed.
        test_split: share of the problems reserved for `reset(options={"split": "test"})`.

    Raises:
        NotFoundError: the data set does not exist.
        ConfigError: an argument or the data set is invalid.
    """

    def __init__(
        self,
        model_name: str,
        dataset_path: str | Path | None = None,
        max_generation: int = 128,
        seed: int = 42,
        test_split: float = 0.1,
    ) -> None:
        super().__init__(model_name, max_generation, seed)
        problems = make_sums(_SUM_LIMIT)
        if dataset_path is not None:
            with rename_in_errors({"data": "dataset_path"}):
                problems = read_problems(Path(check_value("dataset_path", PathText, dataset_path)))
        check_value("test_split", ShareBelow1, test_split)
        self._problems_by_split = split_problems(problems, test_split, int(seed))
        self._problem = problems[0]

    def _start_episode(self, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        unknown_names = sorted(options.keys() - {"split"})
        if unknown_names:
            raise ConfigError(f"options must contain only split, got {unknown_names}; remove them")
        split = options.get("split", "train")
        if split not in self._problems_by_split:
            raise ConfigError(f"split must be 'train' or 'test', got {split!r}")
        problems = self._problems_by_split[split]
        if not problems:
            raise ConfigError("there are no test problems; set test_split above 0")
        self._problem = problems[int(self.np_random.integers(len(problems)))]
        question = self._problem.question
        return make_problem_prompt(question), {"question": question, "split": split}

    def _score(self, answer: str) -> float:
        return distance_to_answer(answer, self._problem.solution)

    def _make_final_info(self) -> dict[str, Any]:
        return {"solution": self._problem.solution}


def make_problem_prompt(question: str) -> str:
    """Return the prompt for a problem."""
    return _INSTRUCTION.format(question=question)


def split_problems(
    problems: Sequence[NumberProblem], test_share: float, seed: int
) -> dict[str, list[NumberProblem]]:
    """Split problems into "train" and "test"; problems with the same question stay together."""
    questions = list(dict.fromkeys(problem.question for problem in problems))
    make_random(seed, Stream.PROBLEM_SPLIT).shuffle(questions)
    test_questions = set(questions[: round(test_share * len(questions))])
    problems_by_split: dict[str, list[NumberProblem]] = {"train": [], "test": []}
    for problem in problems:
        problems_by_split["test" if problem.question in test_questions else "train"].append(problem)
    if not problems_by_split["train"]:
        raise ConfigError(
            f"test_split = {test_share} of {len(questions)} questions leaves no training "
            "problems; lower test_split, or add questions"
        )
    return problems_by_split


def make_sums(limit: int) -> list[NumberProblem]:
    """Return all sums of two or three integers from 0, such as "3+4", that are below `limit`."""
    return [
        NumberProblem("+".join(map(str, numbers)), float(sum(numbers)))
        for num_terms in (2, 3)
        for numbers in itertools.product(range(limit), repeat=num_terms)
        if sum(numbers) < limit
    ]


def read_problems(path: Path) -> list[NumberProblem]:
    """Return the problems in a file or a folder."""
    problems = list(_iterate_problems(path))
    if not problems:
        raise ConfigError(f"data set '{path}' has no rows; add at least one")
    return problems


def _iterate_problems(path: Path) -> Iterator[NumberProblem]:
    for row in read_rows(path):
        question = _find_column(row.columns, _QUESTION_COLUMNS, row.location)
        answer = str(_find_column(row.columns, _SOLUTION_COLUMNS, row.location))
        solution = parse_number(answer.rpartition(_SOLUTION_MARK)[2].strip())
        if solution is None:
            raise ConfigError(f"{row.location}: the answer must be a number, got {answer!r:.80}")
        yield NumberProblem(str(question), solution)


def _find_column(columns: Mapping[str, Any], names: Sequence[str], location: str) -> Any:
    for name in names:
        if columns.get(name) is not None:
            return columns[name]
    raise ConfigError(
        f"{location}: one of the columns {', '.join(names)} is needed, got {', '.join(columns)}"
    )
