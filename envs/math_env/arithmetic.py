"""Arithmetic operations, each with its sign, its solution and its largest possible solution."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .models import Operation


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One operation on two numbers from 0 to `limit` - 1."""

    sign: str
    compute_solution: Callable[[int, int], int]
    compute_max_solution: Callable[[int], int]
    """Function from `limit` to the largest solution. The smallest solution is 0."""
    puts_larger_first: bool = False
    """True if the larger number comes first, so that no solution is negative."""


OPERATIONS: Mapping[Operation, Arithmetic] = {
    "add": Arithmetic("+", operator.add, lambda limit: 2 * (limit - 1)),
    "subtract": Arithmetic("-", operator.sub, lambda limit: limit - 1, puts_larger_first=True),
    "multiply": Arithmetic("x", operator.mul, lambda limit: (limit - 1) ** 2),
}
