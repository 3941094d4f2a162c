"""Baselines for reasoning tasks. Each chooses from one observation only."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

_GUESSES = ("0", "1", "2", "True", "False", "Yes", "No", "A", "B")


def fixed_policies(options: Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """Return the baselines by name: "random", and "solution" with the option `shows_solution`."""
    policies: dict[str, FixedPolicy] = {"random": guess_answer}
    if options.get("shows_solution"):
        policies["solution"] = give_solution
    return policies


def guess_answer(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Return one of a few short answers; all are equally likely."""
    return {"answer": rng.choice(_GUESSES)}


def give_solution(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Return the solution in the observation; "" if the generator knows none."""
    return {"answer": observation["correct_answer"] or ""}
