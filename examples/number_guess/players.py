"""A careless player of number_guess, for recordings.

ludus env record number_guess_env --policies examples.number_guess.players:fixed_policies ...
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

RANDOM_SHARE = 0.5
"""Probability that a guess is random."""


def guess_carelessly(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Guess the middle of the possible numbers, or any number at all."""
    if rng.random() < RANDOM_SHARE:
        return {"guess": rng.choice(observation["legal_actions"])}
    return {"guess": (observation["lowest"] + observation["highest"]) // 2}


def fixed_policies(options: Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """Return the player by name."""
    return {"careless": guess_carelessly}
