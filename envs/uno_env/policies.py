"""Fixed policies, to compare with and to play the other seats; each sees one seat's view only."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

from .cards import COLOURS, NUMBERS, WILDS, colour_of, face_of
from .models import UnoObservation
from .rules import DRAW, PASS

Policy = Callable[[UnoObservation, random.Random], str]
"""From what a seat sees to a legal move; all randomness comes from the generator."""


def play_random(observation: UnoObservation, rng: random.Random) -> str:
    """Any legal move, all equally likely."""
    return rng.choice(observation.legal_actions)


def play_greedy(observation: UnoObservation, rng: random.Random) -> str:
    """A card whenever one fits: signs first, then high numbers, wild ones last.

    A wild card calls the colour of which the hand holds most.
    """
    held = Counter(colour_of(card) for card in observation.hand if card not in WILDS)
    called = max(COLOURS, key=lambda colour: held[colour])

    def worth(move: str) -> tuple[int, int, int]:
        if move in (DRAW, PASS):
            return (0, 0, 0)
        if move.startswith("wild"):
            return (1, int(move.endswith(called)), int("+4" in move))
        face = face_of(move)
        points = int(face) if face in NUMBERS else 20
        return (2, points, held[colour_of(move)])

    return max(observation.legal_actions, key=worth)


POLICIES: dict[str, Policy] = {"random": play_random, "greedy": play_greedy}


def fixed_policies(options: Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """The policies by name, "random" and "greedy"; the same for all options."""
    return {name: _over_the_wire(policy) for name, policy in POLICIES.items()}


def _over_the_wire(policy: Policy) -> FixedPolicy:
    def play(observation: JsonObject, rng: random.Random) -> JsonObject:
        return {"move": policy(UnoObservation.model_validate(observation), rng)}

    return play
