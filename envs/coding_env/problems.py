"""Programming tasks, drawn by seed: a text, a solution and test calls.

The texts of each kind contain parameters such as `$k`. Every task has new random values, so the
solution of one task is wrong for the next. The solution also computes the expected values of the
tests.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

FUNCTION_NAME = "solve"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MAX_LISTED_SOLUTIONS = 32

Arguments = list[Any]
"""Arguments of one call, as JSON values."""


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """A kind of task."""

    name: str
    text: str
    solution: str
    ranges: Mapping[str, tuple[int, int]]
    """Minimum and maximum value of each parameter."""
    draw_arguments: Callable[[random.Random], Arguments]


@dataclass(frozen=True, slots=True)
class TestCall:
    """One call of the function and its expected value."""

    __test__ = False  # pytest would collect it

    arguments: Arguments
    expected_value: Any


@dataclass(frozen=True, slots=True)
class CodingTask:
    """The task of one episode."""

    problem: str
    """Name of its kind."""
    parameters: dict[str, int]
    text: str
    tests: tuple[TestCall, ...]


def _draw_numbers(rng: random.Random) -> Arguments:
    return [[rng.randint(-50, 50) for _ in range(rng.randint(0, 12))]]


def _draw_word(rng: random.Random) -> Arguments:
    return ["".join(rng.choice(_LETTERS) for _ in range(rng.randint(1, 15)))]


def _draw_count(rng: random.Random) -> Arguments:
    return [rng.randint(0, 400)]


_LONG_KINDS = (
    ProblemKind(
        "sum_of_multiples",
        "the sum of all whole numbers from 0 to n - 1 that are divisible by $a or by $b",
        "def solve(n):\n    return sum(i for i in range(n) if i % $a == 0 or i % $b == 0)\n",
        {"a": (2, 9), "b": (2, 9)},
        _draw_count,
    ),
    ProblemKind(
        "digit_sum",
        "the sum of the digits of n, a non-negative whole number, in base $base",
        "def solve(n):\n    total = 0\n    while n:\n        total += n % $base\n"
        "        n //= $base\n    return total\n",
        {"base": (2, 16)},
        _draw_count,
    ),
    ProblemKind(
        "recurrence",
        "x(n) for a non-negative whole number n, where x(0) = 0, x(1) = 1 and "
        "x(i) = ($a * x(i - 1) + $b * x(i - 2)) modulo 997",
        "def solve(n):\n    x, y = 0, 1\n    for _ in range(n):\n"
        "        x, y = y, ($a * y + $b * x) % 997\n    return x\n",
        {"a": (1, 9), "b": (1, 9)},
        _draw_count,
    ),
    ProblemKind(
        "rotate",
        "the list, rotated to the left by $k positions: the first element moves to the end, $k "
        "times",
        "def solve(xs):\n    k = $k % len(xs) if xs else 0\n    return xs[k:] + xs[:k]\n",
        {"k": (1, 9)},
        _draw_numbers,
    ),
    ProblemKind(
        "every_kth",
        "every element of the list whose position, counted from 1, is a multiple of $k, in order",
        "def solve(xs):\n    return xs[$k - 1 :: $k]\n",
        {"k": (2, 5)},
        _draw_numbers,
    ),
    ProblemKind(
        "remainders",
        "the number of elements of the list that leave the remainder $r when they are divided by "
        "$m; remainders are never negative",
        "def solve(xs):\n    return sum(x % $m == $r for x in xs)\n",
        {"m": (4, 9), "r": (0, 3)},
        _draw_numbers,
    ),
    ProblemKind(
        "shift_letters",
        "the word, with each letter (a to z) moved forward by $k positions in the alphabet; after "
        "z comes a",
        "def solve(word):\n    return ''.join(chr((ord(c) - 97 + $k) % 26 + 97) for c in word)\n",
        {"k": (1, 25)},
        _draw_word,
    ),
    ProblemKind(
        "pieces",
        "the word, a string, as a list of pieces of $k letters each; the last may be shorter",
        "def solve(word):\n    return [word[i : i + $k] for i in range(0, len(word), $k)]\n",
        {"k": (2, 6)},
        _draw_word,
    ),
)
_ONE_LINE_KINDS = tuple(
    ProblemKind(
        name,
        f"the {operation} of n, a whole number, and $k",
        f"def solve(n):\n    return n {sign} $k\n",
        {"k": (1, 9)},
        _draw_count,
    )
    for name, operation, sign in (
        ("add", "sum", "+"),
        ("subtract", "difference", "-"),
        ("multiply", "product", "*"),
    )
)
"""Tasks so short that an untrained model learns them."""
_KINDS_BY_NAME = {kind.name: kind for kind in (*_LONG_KINDS, *_ONE_LINE_KINDS)}
KINDS = tuple(_KINDS_BY_NAME)
"""Names of all kinds."""
DEFAULT_KINDS = tuple(kind.name for kind in _LONG_KINDS)
"""All kinds except those with one-line solutions."""


def draw_task(
    rng: random.Random, num_tests: int, kinds: Sequence[str] = DEFAULT_KINDS
) -> CodingTask:
    """Draw a task of one of the kinds, with `num_tests` tests."""
    kind = _KINDS_BY_NAME[rng.choice(kinds)]
    parameters = {name: rng.randint(*value_range) for name, value_range in kind.ranges.items()}
    solve = _load_function(write_solution(kind.name, parameters))
    argument_lists = [kind.draw_arguments(rng) for _ in range(num_tests)]
    tests = tuple(TestCall(arguments, solve(*arguments)) for arguments in argument_lists)
    return CodingTask(kind.name, parameters, _fill_template(kind.text, parameters), tests)


def write_solution(problem: str, parameters: Mapping[str, int]) -> str:
    """Return a program that passes every test of a task."""
    return _fill_template(_KINDS_BY_NAME[problem].solution, parameters)


def list_solutions(kinds: Sequence[str]) -> list[str]:
    """Return the solutions of every task of these kinds, or nothing if there are too many."""
    programs = []
    for kind_name in dict.fromkeys(kinds):
        ranges = _KINDS_BY_NAME[kind_name].ranges
        value_ranges = (range(min_value, max_value + 1) for min_value, max_value in ranges.values())
        for parameter_values in product(*value_ranges):
            programs.append(
                write_solution(kind_name, dict(zip(ranges, parameter_values, strict=True)))
            )
    return programs if len(programs) <= _MAX_LISTED_SOLUTIONS else []


def _fill_template(template: str, parameters: Mapping[str, int]) -> str:
    return string.Template(template).substitute(parameters)


def _load_function(solution: str) -> Callable[..., Any]:
    """Run a solution from this file and return the function that it defines."""
    namespace: dict[str, Any] = {}
    exec(solution, namespace)
    function: Callable[..., Any] = namespace[FUNCTION_NAME]
    return function
