"""What is known exactly: returns of reference policies, and blackjack's basic strategy."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

SOLUTIONS_FILE = "solutions.json"
"""Written by `python -m openspiel_env.solving`."""

UP_CARDS = ("2", "3", "4", "5", "6", "7", "8", "9", "10", "A")
"""What the dealer's open card counts, in the order of strategy charts."""

_SOURCE = "exact enumeration, python -m openspiel_env.solving"

BlackjackMove = Literal["HIT", "STAND"]


@dataclass(frozen=True, slots=True)
class ReferenceReturn:
    """What a policy gets from a game on average, known without playing."""

    expected_return: float
    win_rate: float
    """Share of games with a return above 0."""
    draw_rate: float
    source: str = _SOURCE


@dataclass(frozen=True, slots=True)
class BlackjackState:
    """A decision as far as a strategy chart tells decisions apart."""

    total: int
    is_soft: bool
    up_card: str
    """The dealer's open card: "2" to "10", which stands for J, Q and K too, or "A"."""
    best_move: BlackjackMove
    """Basic strategy: the best move for one who knows only what this state says."""


def reference_returns(game: str, agent_player: int = 0) -> dict[str, ReferenceReturn]:
    """Exact values by policy, always "random" and "optimal"; empty for games not solved.

    The other players, where there are any, choose uniformly at random. "optimal" considers
    all that the player saw; in blackjack that is each single card.
    """
    by_seat = _solutions()["reference_returns"].get(game, {})
    return {
        policy: ReferenceReturn(value["expected_return"], value["win"], value["draw"])
        for policy, value in by_seat.get(str(agent_player), {}).items()
    }


def blackjack_states() -> list[BlackjackState]:
    """All 280 decisions of a blackjack chart: hard, then soft hands, rows by total."""
    return list(_chart_states())


@functools.cache
def basic_strategy() -> dict[tuple[int, bool, str], BlackjackMove]:
    """The best move for each (total, whether it is soft, dealer's open card)."""
    return {(s.total, s.is_soft, s.up_card): s.best_move for s in _chart_states()}


def _chart_states() -> Iterator[BlackjackState]:
    for kind, rows in _solutions()["blackjack_basic_strategy"].items():
        for total, moves in rows.items():
            for up_card, move in zip(UP_CARDS, moves, strict=True):
                best_move: BlackjackMove = "HIT" if move == "H" else "STAND"
                yield BlackjackState(int(total), kind == "soft", up_card, best_move)


@functools.cache
def _solutions() -> dict[str, Any]:
    return json.loads(resources.files(__package__).joinpath(SOLUTIONS_FILE).read_text("utf-8"))
