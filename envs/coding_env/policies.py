"""Fixed policies to compare with; each looks at one observation only."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

from .problems import solution_of

_WRONG = "def solve(*arguments):\n    return None\n"


def fixed_policies(options: Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """The policies by name: "solution" passes all tests, "wrong" none; for all options."""
    return {"solution": solve, "wrong": fail}


def solve(observation: JsonObject, rng: random.Random) -> JsonObject:
    """A program that passes every test."""
    return {"code": solution_of(observation["problem"], observation["parameters"])}


def fail(observation: JsonObject, rng: random.Random) -> JsonObject:
    """A program that runs and passes no test."""
    return {"code": _WRONG}
