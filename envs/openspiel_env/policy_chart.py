"""Prompts for every cell of blackjack's strategy chart."""

from __future__ import annotations

from ludus.env.types import PolicyChartPrompt

from .games import LoadedGame, load_game
from .models import OpenSpielObservation
from .seat_view import SeatView
from .solutions import BlackjackState, load_blackjack_states
from .text import TextStyle, make_renderer

_HIT = 0
_HOLE_CARD = 3 * 13 + 1
"""The two of spades, which no example hand contains."""


def blackjack_chart() -> list[PolicyChartPrompt]:
    """Return one prompt per cell, in the compact style."""
    return _make_prompts("compact")


def blackjack_rules_chart() -> list[PolicyChartPrompt]:
    """Return one prompt per cell, in the rules style."""
    return _make_prompts("rules")


def blackjack_brief_chart() -> list[PolicyChartPrompt]:
    """Return one prompt per cell, in the brief style."""
    return _make_prompts("brief")


def _make_prompts(style: TextStyle) -> list[PolicyChartPrompt]:
    game = load_game("blackjack")
    renderer = make_renderer(game, 0, style)
    return [
        PolicyChartPrompt(
            messages=renderer.render(_make_example_observation(game, state), first=True),
            answers=list(renderer.action_names),
            reference=state.best_move,
            panel="soft" if state.is_soft else "hard",
            row=str(state.total),
            column=state.up_card,
        )
        for state in load_blackjack_states()
    ]


def _make_example_observation(
    loaded_game: LoadedGame, state: BlackjackState
) -> OpenSpielObservation:
    """Return the observation of an example hand in that state."""
    first_rank, second_rank, *drawn_ranks = _choose_example_ranks(state.total, state.is_soft)
    up_card = 1 if state.up_card == "A" else int(state.up_card)
    game_state = loaded_game.game.new_initial_state()
    # Different suits prevent duplicates: a club, a diamond, the hidden spade, a heart, then clubs.
    for card in (first_rank - 1, 13 + second_rank - 1, _HOLE_CARD, 26 + up_card - 1):
        game_state.apply_action(card)
    for rank in drawn_ranks:
        game_state.apply_action(_HIT)
        game_state.apply_action(rank - 1)
    return SeatView(loaded_game, 0).observe(game_state, "initial")


def _choose_example_ranks(total: int, is_soft: bool) -> tuple[int, ...]:
    """Return the card values of an example hand, with 1 for an ace."""
    if is_soft:
        return 1, total - 11
    if total <= 11:
        return 2, total - 2
    return (10, total - 10) if total <= 20 else (10, 9, 2)
