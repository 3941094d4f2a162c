"""Baselines for arithmetic. Each chooses from one observation only."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

from .arithmetic import OPERATIONS


def fixed_policies(options: Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """Return the baselines by name: "random" guesses, "optimal" computes."""
    return {"random": guess_answer, "optimal": compute_answer}


def guess_answer(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Return a random possible answer; all are equally likely."""
    return {"answer": rng.choice(observation["legal_actions"])}


def compute_answer(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Return the right answer."""
    arithmetic = OPERATIONS[observation["operation"]]
    return {"answer": arithmetic.compute_solution(observation["left"], observation["right"])}
