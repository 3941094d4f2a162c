"""Fixed policies to compare with, and to play the other seats.

Each looks at one observation, so a policy can sit at any seat, here or across a wire.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

from .best_response import GAMES as SMALL_POKER
from .best_response import best_response
from .games import LoadedGame, load_game
from .models import OpenSpielObservation
from .search import search_move
from .solutions import basic_strategy
from .text.blackjack import BlackjackRenderer, hand_and_up_card
from .text.boards import cells, rows
from .text.catch import ball_and_paddle
from .text.connect_four import PIECES
from .text.tic_tac_toe import board_of

Policy = Callable[[OpenSpielObservation, random.Random], int]
"""From what a seat sees to a legal action; all randomness comes from the generator."""

_HIT, _STAND = (BlackjackRenderer.words.index(word) for word in ("HIT", "STAND"))
_DEALER_STANDS_AT = 17
_NUM_SIMULATIONS = 100


def fixed_policies(game: str | Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """The game's policies by name, as they play over any wire; "random" for every game.

    Args:
        game: its name, or the options an environment is built with.

    Raises:
        NotFoundError: there is no game of that name.
    """
    options: Mapping[str, Any] = {"game": game} if isinstance(game, str) else game
    loaded = load_game(options.get("game", "catch"), options.get("game_params"))
    return {name: _over_the_wire(policy) for name, policy in seat_policies(loaded).items()}


def seat_policies(loaded: LoadedGame) -> dict[str, Policy]:
    """The game's policies by name."""
    policies: dict[str, Policy] = {"random": play_random}
    if loaded.short_name == "blackjack":
        policies |= {
            "always_stand": always_stand,
            "dealer_rule": dealer_rule,
            "basic_strategy": play_basic_strategy,
        }
    elif loaded.short_name == "catch":
        num_columns = loaded.game.observation_tensor_shape()[1]
        policies["follow_ball"] = functools.partial(follow_ball, num_columns=num_columns)
    elif loaded.short_name == "tic_tac_toe":
        policies["minimax"] = minimax
    elif loaded.short_name == "connect_four":
        policies["mcts"] = functools.partial(search_connect_four, loaded=loaded)
    elif loaded.short_name in SMALL_POKER and loaded.num_players == 2:
        policies["best_response"] = best_response(loaded)
    return policies


def play_random(observation: OpenSpielObservation, rng: random.Random) -> int:
    """Any legal action, all equally likely."""
    return rng.choice(observation.legal_actions)


def always_stand(observation: OpenSpielObservation, rng: random.Random) -> int:
    """The best blackjack policy that cannot see its hand."""
    return _STAND


def dealer_rule(observation: OpenSpielObservation, rng: random.Random) -> int:
    """Blackjack as the dealer must play: hit below 17."""
    total, _, _ = hand_and_up_card(observation.info_state)
    return _HIT if total < _DEALER_STANDS_AT else _STAND


def play_basic_strategy(observation: OpenSpielObservation, rng: random.Random) -> int:
    """The best blackjack policy that sees only total, soft or hard, and the open card."""
    move = basic_strategy()[hand_and_up_card(observation.info_state)]
    return _HIT if move == "HIT" else _STAND


def follow_ball(
    observation: OpenSpielObservation, rng: random.Random, *, num_columns: int = 5
) -> int:
    """Optimal play of catch: towards the ball's column, then stay under it."""
    ball, paddle, _ = ball_and_paddle(observation.info_state, num_columns)
    return 1 + (ball > paddle) - (ball < paddle)


def minimax(observation: OpenSpielObservation, rng: random.Random) -> int:
    """Tic-tac-toe that never loses, and among such moves the best against random play."""
    board = board_of(observation.info_state)
    me = "x" if board.count("x") == board.count("o") else "o"
    return max(
        observation.legal_actions,
        key=lambda cell: _board_value(_marked(board, cell, me), me),
    )


def search_connect_four(
    observation: OpenSpielObservation, rng: random.Random, *, loaded: LoadedGame
) -> int:
    """Tree search of 100 simulations, from the board alone."""
    game = loaded.game
    _, _, num_columns = game.observation_tensor_shape()
    board = cells(observation.info_state, PIECES)
    shown = {
        "board": [list(row) for row in rows(board, num_columns)],
        "current_player": "o" if board.count("x") > board.count("o") else "x",
        "is_terminal": False,
        "winner": "",
    }
    state = game.new_initial_state(json.dumps(shown))
    return search_move(game, state, rng, _NUM_SIMULATIONS)


@functools.cache
def _board_value(board: str, me: str) -> tuple[int, float]:
    """The result with best play on both sides, then the mean result against random play."""
    winner = _winner(board)
    if winner or "." not in board:
        result = 0 if not winner else 1 if winner == me else -1
        return result, float(result)
    mark = "x" if board.count("x") == board.count("o") else "o"
    free = [cell for cell in range(len(board)) if board[cell] == "."]
    values = [_board_value(_marked(board, cell, mark), me) for cell in free]
    if mark == me:
        return max(values)
    return min(result for result, _ in values), sum(mean for _, mean in values) / len(values)


_LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def _winner(board: str) -> str:
    """The mark that has a line; empty when none has."""
    for a, b, c in _LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return ""


def _marked(board: str, cell: int, mark: str) -> str:
    return board[:cell] + mark + board[cell + 1 :]


def _over_the_wire(policy: Policy) -> FixedPolicy:
    def play(observation: JsonObject, rng: random.Random) -> JsonObject:
        return {"action_id": policy(OpenSpielObservation.model_construct(**observation), rng)}

    return play
