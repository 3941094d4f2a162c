"""Write sums of three two-digit numbers, for a language model that learns to think.

    chats.jsonl     conversations whose answers think first, for `ludus sft`
    sums.jsonl      questions and their answers, for `ludus train`
    test.jsonl      questions and their answers for the evaluation, which are in no other file

Each answer adds the first two numbers and then the third, for example
<think>47+38=85, 85+21=106</think>106. All answers are correct, but there are too few of them for
the model to learn addition.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

from prompts_env import write_rows

_SMALLEST, _LARGEST = 10, 49
_NUM_SUMS, _NUM_TEST_SUMS = 4000, 400

Numbers = tuple[int, int, int]


def make_question(numbers: Numbers) -> str:
    """Return the question that the user asks."""
    return " + ".join(map(str, numbers)) + " = ?"


def make_response(numbers: Numbers) -> str:
    """Return the thought and the answer."""
    first, second, third = numbers
    partial = first + second
    total = partial + third
    return f"<think>{first}+{second}={partial}, {partial}+{third}={total}</think>{total}"


def choose_sums(num_sums: int, rng: random.Random) -> list[Numbers]:
    """Choose different sums at random."""
    size = _LARGEST - _SMALLEST + 1
    chosen = []
    for index in rng.sample(range(size**3), num_sums):
        rest, third = divmod(index, size)
        first, second = divmod(rest, size)
        chosen.append((_SMALLEST + first, _SMALLEST + second, _SMALLEST + third))
    return chosen


def write_chats(path: Path, sums: Iterable[Numbers]) -> None:
    """Write a conversation for each sum."""
    rows = ({"prompt": make_question(s), "completion": make_response(s)} for s in sums)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_sums(path: Path, sums: list[Numbers]) -> None:
    """Write the question and the answer of each sum."""
    write_rows({"prompt": [make_question(s) for s in sums], "answer": [sum(s) for s in sums]}, path)


def main() -> None:
    """Write the three files to a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-chats", type=int, default=200, help="number of conversations")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    num_sums = _NUM_TEST_SUMS + args.num_chats + _NUM_SUMS
    sums = choose_sums(num_sums, random.Random(args.seed))
    first_sum = _NUM_TEST_SUMS + args.num_chats
    write_sums(args.folder / "test.jsonl", sums[:_NUM_TEST_SUMS])
    write_chats(args.folder / "chats.jsonl", sums[_NUM_TEST_SUMS:first_sum])
    write_sums(args.folder / "sums.jsonl", sums[first_sum:])


if __name__ == "__main__":
    main()
