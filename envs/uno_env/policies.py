"""Baselines, which also play the other seats. Each sees one seat's observation only."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

from .cards import COLORS, NUMBERS, WILDS, get_card_color, get_card_symbol
from .models import UnoObservation
from .rules import DRAW, PASS

OpponentName = Literal["random", "greedy"]
SeatPolicy = Callable[[UnoObservation, random.Random], str]
"""Function from an observation to a legal move. All randomness comes from the generator."""

_ACTION_CARD_POINTS = 20


def play_random(observation: UnoObservation, rng: random.Random) -> str:
    """Return a random legal move; all are equally likely."""
    return rng.choice(observation.legal_actions)


def play_greedy(observation: UnoObservation, rng: random.Random) -> str:
    """Return a card if one is legal: action cards first, then high numbers, wild cards last.

    A wild card calls the most frequent color of the hand.
    """
    color_counts = Counter(get_card_color(card) for card in observation.hand if card not in WILDS)
    best_color = max(COLORS, key=lambda color: color_counts[color])

    def rank_move(move: str) -> tuple[int, int, int]:
        if move in (DRAW, PASS):
            return (0, 0, 0)
        if move.startswith("wild"):
            return (1, int(move.endswith(best_color)), int("+4" in move))
        symbol = get_card_symbol(move)
        points = int(symbol) if symbol in NUMBERS else _ACTION_CARD_POINTS
        return (2, points, color_counts[get_card_color(move)])

    return max(observation.legal_actions, key=rank_move)


OPPONENTS: dict[OpponentName, SeatPolicy] = {"random": play_random, "greedy": play_greedy}


def fixed_policies(options: Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """Return the baselines by name: "random" and "greedy"."""
    return {name: _make_fixed_policy(policy) for name, policy in OPPONENTS.items()}


def _make_fixed_policy(policy: SeatPolicy) -> FixedPolicy:
    def play(observation: JsonObject, rng: random.Random) -> JsonObject:
        return {"move": policy(UnoObservation.model_validate(observation), rng)}

    return play
