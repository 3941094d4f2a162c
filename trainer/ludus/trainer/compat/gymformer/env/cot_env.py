"""An environment of math problems that are solved by a chain of thought.

A completion must contain <final_answer>x</final_answer>. Its reward is -|x - y| for the solution y,
-5 if x is not a number, and -10 without the tags. The token limit ends the episode like an EOS
token: the completion is rewarded as it is, so the episode counts as terminated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.gymformer.arguments import (
    check_number,
    rename_setting_in_errors,
    require_path,
)
from ludus.trainer.compat.gymformer.env.problems import ProblemSplit, read_problems, sums_below
from ludus.trainer.compat.gymformer.env.rewards import distance_to_answer
from ludus.trainer.compat.gymformer.env.token_env import CompletionResult, TokenEnv

_SUMS_BELOW = 10
_INSTRUCTION = (
    "Solve the problem step by step. Think between <think> and </think>, then give the number "
    "between <final_answer> and </final_answer>.\n\nProblem: {question}\n"
)


class CoTEnv(TokenEnv):
    """An environment of problems whose solution is a number; each step takes one token.

    Args:
        model_name: Hugging Face id or folder of the tokenizer.
        dataset_path: file or folder of problems (format: `problems`). None uses sums below 10.
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
        problems = sums_below(_SUMS_BELOW)
        if dataset_path is not None:
            with rename_setting_in_errors({"data": "dataset_path"}):
                problems = read_problems(Path(require_path("dataset_path", dataset_path)))
        check_number("test_split", test_split)
        self._split = ProblemSplit.make(problems, test_split, int(seed))
        self._problem = problems[0]

    def _start_episode(
        self, seed: int | None, options: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        unknown = sorted(options.keys() - {"split"})
        if unknown:
            raise ConfigError(f"options must contain only split, got {unknown}; remove them")
        split = options.get("split", "train")
        if split not in ("train", "test"):
            raise ConfigError(f"split must be 'train' or 'test', got {split!r}")
        problems = self._split.train if split == "train" else self._split.test
        if not problems:
            raise ConfigError("there are no test problems; set test_split above 0")
        self._problem = problems[int(self.np_random.integers(len(problems)))]
        question = self._problem.question
        return make_problem_prompt(question), {"question": question, "split": split}

    def _finish_episode(self, answer: str, *, ended: bool) -> CompletionResult:
        reward = distance_to_answer(answer, self._problem.solution)
        return CompletionResult(reward, is_terminated=True)

    def _final_info(self) -> dict[str, Any]:
        return {"solution": self._problem.solution}


def make_problem_prompt(question: str) -> str:
    """Return the prompt for a problem."""
    return _INSTRUCTION.format(question=question)
