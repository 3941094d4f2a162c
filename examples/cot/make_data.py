"""Writes sums.jsonl: all sums of two and three numbers that stay below ten.

Each row has some answers in the form that is wanted, with numbers drawn at random: a tiny model
learns the form from them, and nothing of sums.
"""

from __future__ import annotations

import random
from pathlib import Path

from ludus.trainer.compat.gymformer.env.problems import sums_below
from prompts_env import write_rows

_LIMIT = 10
_NUM_EXAMPLES = 4


def main() -> None:
    """Write the file beside this one."""
    draw = random.Random("examples of answers")
    problems = sums_below(_LIMIT)
    write_rows(
        {
            "question": [one.question for one in problems],
            "answer": [int(one.solution) for one in problems],
            "examples": [
                [
                    f"<think>{one.question}</think><final_answer>{draw.randrange(_LIMIT)}</final_answer>"
                    for _ in range(_NUM_EXAMPLES)
                ]
                for one in problems
            ],
        },
        Path(__file__).with_name("sums.jsonl"),
    )


if __name__ == "__main__":
    main()
