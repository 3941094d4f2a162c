"""Write sums.jsonl: all sums of two or three numbers that are below ten.

Each row has example answers in the required format with random numbers. A tiny model learns the
format from them, but no sums.
"""

from __future__ import annotations

import random
from pathlib import Path

from ludus.trainer.compat.gymformer.env.cot_env import make_sums
from prompts_env import write_rows

_LIMIT = 10
_NUM_EXAMPLES = 4


def main() -> None:
    """Write the file to the folder of this script."""
    rng = random.Random("examples of answers")
    problems = make_sums(_LIMIT)
    write_rows(
        {
            "question": [problem.question for problem in problems],
            "answer": [int(problem.solution) for problem in problems],
            "examples": [
                [
                    f"<think>{problem.question}</think>"
                    f"<final_answer>{rng.randrange(_LIMIT)}</final_answer>"
                    for _ in range(_NUM_EXAMPLES)
                ]
                for problem in problems
            ],
        },
        Path(__file__).with_name("sums.jsonl"),
    )


if __name__ == "__main__":
    main()
