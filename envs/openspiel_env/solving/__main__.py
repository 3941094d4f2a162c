"""Program that writes solutions.json: `python -m openspiel_env.solving`. Takes about a minute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyspiel

from ..solutions import SOLUTIONS_FILE, UP_CARDS
from . import blackjack
from .small_games import GameValue, solve_hidden_information, solve_perfect_information

_NUM_DIGITS = 12


def main() -> None:
    """Write the file to the package's folder."""
    chart = blackjack.find_basic_strategy()
    solutions = {
        "made_by": "python -m openspiel_env.solving",
        "blackjack_basic_strategy": _make_chart_rows(chart),
        "reference_returns": {
            "blackjack": {"0": _round_values(_compute_blackjack_values(chart))},
            "catch": _solve_seats("catch", solve_perfect_information),
            "tic_tac_toe": _solve_seats("tic_tac_toe", solve_perfect_information),
            "kuhn_poker": _solve_seats("kuhn_poker", solve_hidden_information),
        },
    }
    path = Path(__file__).parent.parent / SOLUTIONS_FILE
    path.write_text(json.dumps(solutions, indent=1) + "\n")


def _compute_blackjack_values(chart: blackjack.StrategyChart) -> dict[str, GameValue]:
    outcomes = {
        "random": blackjack.evaluate(lambda hand, open_card: 0.5),
        "always_stand": blackjack.evaluate(lambda hand, open_card: 0.0),
        "dealer_rule": blackjack.evaluate(
            lambda hand, open_card: float(blackjack.compute_best_total(hand)[0] < 17)
        ),
        "basic_strategy": blackjack.evaluate(chart.hit_probability),
        "optimal": blackjack.average_over_deals(blackjack.play_optimally),
    }
    return {
        name: GameValue(outcome.expected_return, outcome.win, outcome.draw)
        for name, outcome in outcomes.items()
    }


def _solve_seats(name: str, solve: Any) -> dict[str, Any]:
    game = pyspiel.load_game(name)
    return {str(seat): _round_values(solve(game, seat)) for seat in range(game.num_players())}


def _round_values(value_by_name: Mapping[str, GameValue]) -> dict[str, dict[str, float]]:
    return {
        name: {
            field: round(exact_number, _NUM_DIGITS)
            for field, exact_number in game_value._asdict().items()
        }
        for name, game_value in value_by_name.items()
    }


def _make_chart_rows(chart: blackjack.StrategyChart) -> dict[str, dict[str, str]]:
    """Return the chart by total, with one letter per open card in the order of `UP_CARDS`."""

    def make_row(total: int, is_soft: bool) -> str:
        open_cards = [1 if name == "A" else int(name) for name in UP_CARDS]
        return "".join("H" if (total, is_soft, card) in chart.hits else "S" for card in open_cards)

    return {
        "hard": {str(total): make_row(total, False) for total in range(4, 22)},
        "soft": {str(total): make_row(total, True) for total in range(12, 22)},
    }


if __name__ == "__main__":
    main()
