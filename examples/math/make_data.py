"""Write sums.jsonl: all sums of two numbers below ten, with example answers.

A tiny model learns from `examples` what answers look like, with or without a number, but no sums.
"""

from __future__ import annotations

from pathlib import Path

from prompts_env import write_rows

_LIMIT = 10
_WORDS = ("many", "a lot", "who knows")


def main() -> None:
    """Write the file to the folder of this script."""
    numbers = [str(number) for number in range(2 * _LIMIT - 1)]
    pairs = [(a, b) for a in range(_LIMIT) for b in range(_LIMIT)]
    write_rows(
        {
            "question": [f"{a} + {b}" for a, b in pairs],
            "answer": [a + b for a, b in pairs],
            "examples": [[*numbers, *_WORDS] for _ in pairs],
        },
        Path(__file__).with_name("sums.jsonl"),
    )


if __name__ == "__main__":
    main()
