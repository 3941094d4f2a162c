"""Baselines for programming tasks. Each chooses from one observation only."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

from .problems import write_solution

_WRONG_PROGRAM = "def solve(*arguments):\n    return None\n"


def fixed_policies(options: Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """Return the baselines by name: "solution" passes all tests, "wrong" passes none."""
    return {"solution": solve_task, "wrong": write_wrong_program}


def solve_task(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Return a program that passes every test."""
    return {"code": write_solution(observation["problem"], observation["parameters"])}


def write_wrong_program(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Return a program that runs and passes no test."""
    return {"code": _WRONG_PROGRAM}
