"""Write sums.jsonl: all sums of two numbers below ten, with example answers.

A tiny model learns from `examples` what answers look like, with or without a number, but no sums.
"""

from __future__ import annotations

from pathlib import Path

from prompts_env import write_rows

_LIMIT = 10
_WRONG_ANSWERS = ("many", "a lot", "who knows")


def main() -> None:
    """Write the file to the folder of this script."""
    numbers = [str(number) for number in range(2 * _LIMIT - 1)]
    pairs = [(first, second) for first in range(_LIMIT) for second in range(_LIMIT)]
    write_rows(
        {
            "question": [f"{first} + {second}" for first, second in pairs],
            "answer": [first + second for first, second in pairs],
            "examples": [[*numbers, *_WRONG_ANSWERS] for _ in pairs],
        },
        Path(__file__).with_name("sums.jsonl"),
    )


if __name__ == "__main__":
    main()
