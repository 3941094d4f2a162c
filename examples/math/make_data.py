"""Writes sums.jsonl: all sums of two numbers below ten, and answers of every kind.

A tiny model learns from `examples` what an answer looks like, a number or none, and nothing of
sums.
"""

from __future__ import annotations

from pathlib import Path

from prompts_env import write_rows

_LIMIT = 10
_WORDS = ("many", "a lot", "who knows")


def main() -> None:
    """Write the file beside this one."""
    numbers = [str(number) for number in range(2 * _LIMIT - 1)]
    pairs = [(left, right) for left in range(_LIMIT) for right in range(_LIMIT)]
    write_rows(
        {
            "question": [f"{left} + {right}" for left, right in pairs],
            "answer": [left + right for left, right in pairs],
            "examples": [[*numbers, *_WORDS] for _ in pairs],
        },
        Path(__file__).with_name("sums.jsonl"),
    )


if __name__ == "__main__":
    main()
