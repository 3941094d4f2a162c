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


def make_best_response(
    loaded_game: LoadedGame,
) -> Callable[[OpenSpielObservation, random.Random], int]:
    """Return a policy for both seats of a two-player game."""
    move_by_tensor: dict[tuple[float, ...], int] = {}
    # The policy must exist as long as `response`.
    uniform_policy = pyspiel.UniformRandomPolicy(loaded_game.game)
    for player in range(loaded_game.num_players):
        response = pyspiel.TabularBestResponse(loaded_game.game, player, uniform_policy)
        policy_table = response.get_best_response_policy().policy_table()
        pending_states = [loaded_game.game.new_initial_state()]
        while pending_states:
            state = pending_states.pop()
            if state.is_terminal():
                continue
            if state.current_player() == player:
                tensor = tuple(state.information_state_tensor(player))
                move_by_tensor[tensor] = _find_most_likely_move(
                    policy_table[state.information_state_string(player)]
                )
            pending_states += [state.child(action) for action in state.legal_actions()]

    def play(observation: OpenSpielObservation, rng: random.Random) -> int:
        return move_by_tensor[tuple(observation.info_state)]

    return play


def _find_most_likely_move(probabilities: list[tuple[int, float]]) -> int:
    return max(probabilities, key=lambda move_probability: move_probability[1])[0]
