"""Exact results: returns of reference policies, and blackjack's basic strategy."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

SOLUTIONS_FILE = "solutions.json"
"""File that `python -m openspiel_env.solving` writes."""

UP_CARDS = ("2", "3", "4", "5", "6", "7", "8", "9", "10", "A")
"""Values of the dealer's open card, in the order of strategy charts."""

_SOURCE = "exact enumeration, python -m openspiel_env.solving"

BlackjackMove = Literal["HIT", "STAND"]


@dataclass(frozen=True, slots=True)
class ReferenceReturn:
    """The exact expected return of a policy."""

    expected_return: float
    win_rate: float
    """Share of games with a return above 0."""
    draw_rate: float
    source: str = _SOURCE


@dataclass(frozen=True, slots=True)
class BlackjackState:
    """A cell of the strategy chart."""

    total: int
    is_soft: bool
    up_card: str
    """Dealer's open card: "2" to "10", or "A". "10" includes J, Q and K."""
    best_move: BlackjackMove
    """Best move of a player who knows only this state (basic strategy)."""


def reference_returns(game: str, agent_player: int = 0) -> dict[str, ReferenceReturn]:
    """Return the exact returns by policy, with "random" and "optimal"; none for unsolved games.

    Other players choose uniformly at random. "optimal" uses everything that the player has seen;
    in blackjack these are the individual cards.
    """
    values_by_seat = _load_solutions()["reference_returns"].get(game, {})
    return {
        policy: ReferenceReturn(value["expected_return"], value["win"], value["draw"])
        for policy, value in values_by_seat.get(str(agent_player), {}).items()
    }


def load_blackjack_states() -> list[BlackjackState]:
    """Return the 280 cells of the blackjack chart: hard, then soft hands, by total."""
    return list(_load_chart_states())


@functools.cache
def load_basic_strategy() -> dict[tuple[int, bool, str], BlackjackMove]:
    """Return the best move for each (total, is soft, dealer's open card)."""
    return {
        (state.total, state.is_soft, state.up_card): state.best_move
        for state in _load_chart_states()
    }


def _load_chart_states() -> Iterator[BlackjackState]:
    for hand_kind, rows in _load_solutions()["blackjack_basic_strategy"].items():
        for total, moves in rows.items():
            for up_card, move in zip(UP_CARDS, moves, strict=True):
                best_move: BlackjackMove = "HIT" if move == "H" else "STAND"
                yield BlackjackState(int(total), hand_kind == "soft", up_card, best_move)


@functools.cache
def _load_solutions() -> dict[str, Any]:
    return json.loads(resources.files(__package__).joinpath(SOLUTIONS_FILE).read_text("utf-8"))
