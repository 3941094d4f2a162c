"""Best play against an opponent that moves at random, for poker small enough to look through.

all histories of the game --OpenSpiel's tabular best response--> information state -> move

Who plays the other seat decides what is best: this is the most that can be won from `random`, and
no equilibrium, which would win less from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pyspiel

from .games import LoadedGame
from .models import OpenSpielObservation

GAMES = frozenset({"kuhn_poker", "leduc_poker"})


def best_response(loaded: LoadedGame) -> Callable[[OpenSpielObservation, random.Random], int]:
    """The policy for whichever seat it is shown; for two players."""
    moves: dict[tuple[float, ...], int] = {}
    uniform = pyspiel.UniformRandomPolicy(loaded.game)  # OpenSpiel keeps no reference of its own
    for player in range(loaded.num_players):
        response = pyspiel.TabularBestResponse(loaded.game, player, uniform)
        table = response.get_best_response_policy().policy_table()
        waiting = [loaded.game.new_initial_state()]
        while waiting:
            state = waiting.pop()
            if state.is_terminal():
                continue
            if state.current_player() == player:
                seen = tuple(state.information_state_tensor(player))
                moves[seen] = max(table[state.information_state_string(player)], key=_chance)[0]
            waiting += [state.child(action) for action in state.legal_actions()]

    def play(observation: OpenSpielObservation, rng: random.Random) -> int:
        return moves[tuple(observation.info_state)]

    return play


def _chance(move: tuple[int, float]) -> float:
    return move[1]
