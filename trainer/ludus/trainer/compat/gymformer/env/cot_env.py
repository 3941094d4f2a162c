"""Problems with a number for an answer, which is reached by thinking aloud.

The answer is to end with <final_answer>x</final_answer>. It is worth -|x - y| for a solution of y,
-5 where x is no number, and -10 without the tags. A limit of tokens ends the episode as an end
token does: the answer is judged as it stands, so nothing can follow that would be worth more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.gymformer.arguments import check_number, path_in, told_as
from ludus.trainer.compat.gymformer.env.problems import Split, read_problems, sums_below
from ludus.trainer.compat.gymformer.env.rewards import distance_to_answer
from ludus.trainer.compat.gymformer.env.token_env import Ending, TokenEnv

_SUMS_BELOW = 10
_INSTRUCTION = (
    "Solve the problem step by step. Think between <think> and </think>, then give the number "
    "between <final_answer> and </final_answer>.\n\nProblem: {question}\n"
)


class CoTEnv(TokenEnv):
    """A problem whose answer is a number, a token a step.

    Args:
        model_name: Hugging Face id, or folder, of the tokenizer.
        dataset_path: problems, as `problems` reads them; None is sums below 10.
        max_generation: tokens of an answer, thoughts included.
        seed: of the split, and of the first episode where `reset` has none.
        test_split: share of the problems that is held back for `reset(options={"split": "test"})`.

    Raises:
        NotFoundError: there is no such data set.
        ConfigError: it cannot be used.
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
            with told_as({"data": "dataset_path"}):
                problems = read_problems(Path(path_in("dataset_path", dataset_path)))
        check_number("test_split", test_split)
        self._split = Split.of(problems, test_split, int(seed))
        self._problem = problems[0]

    def _begin(self, seed: int | None, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        unknown = sorted(options.keys() - {"split"})
        if unknown:
            raise ConfigError(f"options expected split alone, got {unknown}; leave those out")
        split = options.get("split", "train")
        if split not in ("train", "test"):
            raise ConfigError(f"expected split 'train' or 'test', got {split!r}")
        problems = self._split.train if split == "train" else self._split.test
        if not problems:
            raise ConfigError("expected problems to be judged by, got none; set test_split above 0")
        self._problem = problems[int(self.np_random.integers(len(problems)))]
        question = self._problem.question
        return prompt_of(question), {"question": question, "split": split}

    def _end(self, answer: str, *, ended: bool) -> Ending:
        return Ending(distance_to_answer(answer, self._problem.solution), is_over=True)

    def _info(self) -> dict[str, Any]:
        return {"solution": self._problem.solution}


def prompt_of(question: str) -> str:
    """What is asked of a problem."""
    return _INSTRUCTION.format(question=question)
