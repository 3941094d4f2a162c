"""Programming tasks, drawn by seed: a text, a solution, and calls with what they return.

Each kind has whole numbers in it (`$k` in its texts), so that an answer to one task is none to the
next. What a call is expected to return, the solution says.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

FUNCTION = "solve"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MAX_LISTED = 32

Arguments = list[Any]
"""Of one call, as JSON."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A kind of task."""

    name: str
    text: str
    solution: str
    ranges: Mapping[str, tuple[int, int]]
    """By parameter: the lowest and the highest value."""
    draw_arguments: Callable[[random.Random], Arguments]


@dataclass(frozen=True, slots=True)
class Test:
    """One call of the function, and what it has to return."""

    arguments: Arguments
    expected: Any


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked in one episode."""

    problem: str
    parameters: dict[str, int]
    text: str
    tests: tuple[Test, ...]


def _numbers(rng: random.Random) -> Arguments:
    return [[rng.randint(-50, 50) for _ in range(rng.randint(0, 12))]]


def _word(rng: random.Random) -> Arguments:
    return ["".join(rng.choice(_LETTERS) for _ in range(rng.randint(1, 15)))]


def _count(rng: random.Random) -> Arguments:
    return [rng.randint(0, 400)]


_PROBLEMS = (
    Problem(
        "sum_of_multiples",
        "the sum of all whole numbers from 0 to n, without n, that $a or $b divides",
        "def solve(n):\n    return sum(i for i in range(n) if i % $a == 0 or i % $b == 0)\n",
        {"a": (2, 9), "b": (2, 9)},
        _count,
    ),
    Problem(
        "digit_sum",
        "the sum of the digits of n, a whole number from 0 on, written in base $base",
        "def solve(n):\n    total = 0\n    while n:\n        total += n % $base\n"
        "        n //= $base\n    return total\n",
        {"base": (2, 16)},
        _count,
    ),
    Problem(
        "recurrence",
        "x(n) for a whole number n from 0 on, where x(0) = 0, x(1) = 1 and "
        "x(i) = ($a * x(i - 1) + $b * x(i - 2)) modulo 997",
        "def solve(n):\n    x, y = 0, 1\n    for _ in range(n):\n"
        "        x, y = y, ($a * y + $b * x) % 997\n    return x\n",
        {"a": (1, 9), "b": (1, 9)},
        _count,
    ),
    Problem(
        "rotate",
        "the list, rotated to the left by $k places: its first element moves to the end, $k times",
        "def solve(xs):\n    k = $k % len(xs) if xs else 0\n    return xs[k:] + xs[:k]\n",
        {"k": (1, 9)},
        _numbers,
    ),
    Problem(
        "every_kth",
        "every element of the list whose place, counted from 1, is a multiple of $k, in order",
        "def solve(xs):\n    return xs[$k - 1 :: $k]\n",
        {"k": (2, 5)},
        _numbers,
    ),
    Problem(
        "remainders",
        "how many elements of the list leave the remainder $r when they are divided by $m, "
        "where a remainder is never negative",
        "def solve(xs):\n    return sum(x % $m == $r for x in xs)\n",
        {"m": (4, 9), "r": (0, 3)},
        _numbers,
    ),
    Problem(
        "shift_letters",
        "the word, with each of its letters (a to z) moved on by $k places in the alphabet; a "
        "follows after z",
        "def solve(word):\n    return ''.join(chr((ord(c) - 97 + $k) % 26 + 97) for c in word)\n",
        {"k": (1, 25)},
        _word,
    ),
    Problem(
        "pieces",
        "the word, a text, as a list of pieces of $k letters each; the last may be shorter",
        "def solve(word):\n    return [word[i : i + $k] for i in range(0, len(word), $k)]\n",
        {"k": (2, 6)},
        _word,
    ),
)
_ONE_LINE = tuple(
    Problem(
        name,
        f"the {result} of n, a whole number, and $k",
        f"def solve(n):\n    return n {sign} $k\n",
        {"k": (1, 9)},
        _count,
    )
    for name, result, sign in (
        ("add", "sum", "+"),
        ("subtract", "difference", "-"),
        ("multiply", "product", "*"),
    )
)
"""So little to say that a model made from nothing learns it."""
_BY_NAME = {problem.name: problem for problem in (*_PROBLEMS, *_ONE_LINE)}
KINDS = tuple(_BY_NAME)
"""Names of all kinds of tasks."""
DEFAULT_KINDS = tuple(problem.name for problem in _PROBLEMS)
"""All but those of one line."""


def draw_task(rng: random.Random, num_tests: int, kinds: Sequence[str] = DEFAULT_KINDS) -> Task:
    """A task of one of the kinds, with that many tests."""
    problem = _BY_NAME[rng.choice(kinds)]
    parameters = {name: rng.randint(*ends) for name, ends in problem.ranges.items()}
    solve = _function_of(solution_of(problem.name, parameters))
    calls = [problem.draw_arguments(rng) for _ in range(num_tests)]
    tests = tuple(Test(call, solve(*call)) for call in calls)
    return Task(problem.name, parameters, _filled(problem.text, parameters), tests)


def solution_of(problem: str, parameters: Mapping[str, int]) -> str:
    """A program that passes every test of such a task."""
    return _filled(_BY_NAME[problem].solution, parameters)


def all_programs(kinds: Sequence[str]) -> list[str]:
    """Solutions of every task of these kinds; empty where they are too many to list."""
    programs = []
    for kind in dict.fromkeys(kinds):
        ranges = _BY_NAME[kind].ranges
        for numbers in product(*(range(low, high + 1) for low, high in ranges.values())):
            programs.append(solution_of(kind, dict(zip(ranges, numbers, strict=True))))
    return programs if len(programs) <= _MAX_LISTED else []


def _filled(text: str, parameters: Mapping[str, int]) -> str:
    return string.Template(text).substitute(parameters)


def _function_of(solution: str) -> Callable[..., Any]:
    """The function that one of our own solutions defines."""
    names: dict[str, Any] = {}
    exec(solution, names)
    function: Callable[..., Any] = names[FUNCTION]
    return function
