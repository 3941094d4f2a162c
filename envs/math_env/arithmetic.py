"""The operations: how a question is written, what it comes to, and what answers there can be."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .models import Operation


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One operation on two numbers from 0 to `limit` - 1."""

    sign: str
    solve: Callable[[int, int], int]
    highest: Callable[[int], int]
    """From `limit` to the largest solution; the smallest is 0."""
    larger_first: bool = False
    """True where the larger number stands on the left, so that no solution is below 0."""


OPERATIONS: Mapping[Operation, Arithmetic] = {
    "add": Arithmetic("+", operator.add, lambda limit: 2 * (limit - 1)),
    "subtract": Arithmetic("-", operator.sub, lambda limit: limit - 1, larger_first=True),
    "multiply": Arithmetic("x", operator.mul, lambda limit: (limit - 1) ** 2),
}
