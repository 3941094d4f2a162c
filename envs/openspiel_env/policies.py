"""Baselines, which can also play the other seats.

Each baseline chooses from one observation only, so it can play any seat, in process or over a
connection.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

from .best_response import BEST_RESPONSE_GAMES, make_best_response
from .games import LoadedGame, load_game
from .models import OpenSpielObservation
from .search import search_move
from .solutions import load_basic_strategy
from .text.blackjack import BlackjackRenderer, read_hand_and_up_card
from .text.boards import read_cells, split_rows
from .text.catch import read_ball_and_paddle
from .text.connect_four import PIECES
from .text.tic_tac_toe import read_board

SeatPolicy = Callable[[OpenSpielObservation, random.Random], int]
"""Function from an observation to a legal action. All randomness comes from the generator."""

_HIT, _STAND = (BlackjackRenderer.action_names.index(word) for word in ("HIT", "STAND"))
_DEALER_STANDS_AT = 17
_NUM_SIMULATIONS = 100


def fixed_policies(game: str | Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """Return the game's baselines by name. Every game has "random".

    Args:
        game: Name of the game, or the options of an environment.

    Raises:
        NotFoundError: The game does not exist.
    """
    options: Mapping[str, Any] = {"game": game} if isinstance(game, str) else game
    loaded_game = load_game(options.get("game", "catch"), options.get("game_params"))
    return {
        name: _make_fixed_policy(policy) for name, policy in make_seat_policies(loaded_game).items()
    }


def make_seat_policies(loaded_game: LoadedGame) -> dict[str, SeatPolicy]:
    """Return the game's baselines by name, as functions of typed observations."""
    policies: dict[str, SeatPolicy] = {"random": play_random}
    if loaded_game.short_name == "blackjack":
        policies |= {
            "always_stand": play_always_stand,
            "dealer_rule": play_dealer_rule,
            "basic_strategy": play_basic_strategy,
        }
    elif loaded_game.short_name == "catch":
        num_columns = loaded_game.game.observation_tensor_shape()[1]
        policies["follow_ball"] = functools.partial(follow_ball, num_columns=num_columns)
    elif loaded_game.short_name == "tic_tac_toe":
        policies["minimax"] = play_minimax
    elif loaded_game.short_name == "connect_four":
        policies["mcts"] = functools.partial(search_connect_four, loaded_game=loaded_game)
    elif loaded_game.short_name in BEST_RESPONSE_GAMES and loaded_game.num_players == 2:
        policies["best_response"] = make_best_response(loaded_game)
    return policies


def play_random(observation: OpenSpielObservation, rng: random.Random) -> int:
    """Return a random legal action; all are equally likely."""
    return rng.choice(observation.legal_actions)


def play_always_stand(observation: OpenSpielObservation, rng: random.Random) -> int:
    """Stand. No blackjack policy without knowledge of its hand is better."""
    return _STAND


def play_dealer_rule(observation: OpenSpielObservation, rng: random.Random) -> int:
    """Play blackjack by the dealer's rule: hit below 17."""
    total, _, _ = read_hand_and_up_card(observation.info_state)
    return _HIT if total < _DEALER_STANDS_AT else _STAND


def play_basic_strategy(observation: OpenSpielObservation, rng: random.Random) -> int:
    """Play blackjack optimally given only the total, soft or hard, and the open card."""
    move = load_basic_strategy()[read_hand_and_up_card(observation.info_state)]
    return _HIT if move == "HIT" else _STAND


def follow_ball(
    observation: OpenSpielObservation, rng: random.Random, *, num_columns: int = 5
) -> int:
    """Play catch optimally: move to the ball's column, then stay."""
    ball, paddle, _ = read_ball_and_paddle(observation.info_state, num_columns)
    return 1 + (ball > paddle) - (ball < paddle)


def play_minimax(observation: OpenSpielObservation, rng: random.Random) -> int:
    """Play tic-tac-toe without losing. Among such moves, choose the best against random play."""
    board = read_board(observation.info_state)
    mark = _find_next_mark(board)
    return max(
        observation.legal_actions,
        key=lambda cell: _evaluate_board(_place_mark(board, cell, mark), mark),
    )


def search_connect_four(
    observation: OpenSpielObservation, rng: random.Random, *, loaded_game: LoadedGame
) -> int:
    """Search the game tree with 100 simulations, from the board alone."""
    game = loaded_game.game
    _, _, num_columns = game.observation_tensor_shape()
    board = read_cells(observation.info_state, PIECES)
    position = {
        "board": [list(row) for row in split_rows(board, num_columns)],
        "current_player": "o" if board.count("x") > board.count("o") else "x",
        "is_terminal": False,
        "winner": "",
    }
    state = game.new_initial_state(json.dumps(position))
    return search_move(game, state, rng, _NUM_SIMULATIONS)


@functools.cache
def _evaluate_board(board: str, player: str) -> tuple[int, float]:
    """Return a player's result if both play best, and the mean result against random play."""
    winner = _find_winner(board)
    if winner or "." not in board:
        outcome = 0 if not winner else 1 if winner == player else -1
        return outcome, float(outcome)
    mark = _find_next_mark(board)
    free_cells = [cell for cell in range(len(board)) if board[cell] == "."]
    results = [_evaluate_board(_place_mark(board, cell, mark), player) for cell in free_cells]
    if mark == player:
        return max(results)
    return min(outcome for outcome, _ in results), sum(mean for _, mean in results) / len(results)


_LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def _find_winner(board: str) -> str:
    """Return the mark with three in a line, or ""."""
    for a, b, c in _LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return ""


def _find_next_mark(board: str) -> str:
    return "x" if board.count("x") == board.count("o") else "o"


def _place_mark(board: str, cell: int, mark: str) -> str:
    return board[:cell] + mark + board[cell + 1 :]


def _make_fixed_policy(policy: SeatPolicy) -> FixedPolicy:
    def play(observation: JsonObject, rng: random.Random) -> JsonObject:
        return {"action_id": policy(OpenSpielObservation.model_construct(**observation), rng)}

    return play
