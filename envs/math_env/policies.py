"""Fixed policies to compare with; each looks at one observation only."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

from .arithmetic import OPERATIONS


def fixed_policies(options: Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """The policies by name: "random" guesses, "optimal" computes; the same for all options."""
    return {"random": guess, "optimal": compute}


def guess(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Any answer that there can be, all equally likely."""
    return {"answer": rng.choice(observation["legal_actions"])}


def compute(observation: JsonObject, rng: random.Random) -> JsonObject:
    """The right answer."""
    arithmetic = OPERATIONS[observation["operation"]]
    return {"answer": arithmetic.solve(observation["left"], observation["right"])}
