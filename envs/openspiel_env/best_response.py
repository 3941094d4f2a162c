"""Best response to a random opponent, for poker games small enough to enumerate.

all histories of the game --OpenSpiel's tabular best response--> information state -> move

The result wins the most against `random`. It is not an equilibrium, which would win less.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pyspiel

from .games import LoadedGame
from .models import OpenSpielObservation

BEST_RESPONSE_GAMES = frozenset({"kuhn_poker", "leduc_poker"})


def make_best_response(loaded: LoadedGame) -> Callable[[OpenSpielObservation, random.Random], int]:
    """Return a policy for both seats of a two-player game."""
    moves: dict[tuple[float, ...], int] = {}
    uniform = pyspiel.UniformRandomPolicy(loaded.game)  # must outlive `response`
    for player in range(loaded.num_players):
        response = pyspiel.TabularBestResponse(loaded.game, player, uniform)
        table = response.get_best_response_policy().policy_table()
        stack = [loaded.game.new_initial_state()]
        while stack:
            state = stack.pop()
            if state.is_terminal():
                continue
            if state.current_player() == player:
                tensor = tuple(state.information_state_tensor(player))
                moves[tensor] = _most_likely(table[state.information_state_string(player)])
            stack += [state.child(action) for action in state.legal_actions()]

    def play(observation: OpenSpielObservation, rng: random.Random) -> int:
        return moves[tuple(observation.info_state)]

    return play


def _most_likely(probabilities: list[tuple[int, float]]) -> int:
    return max(probabilities, key=lambda move: move[1])[0]
