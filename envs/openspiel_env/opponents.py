"""Players of the other seats: simple rules, a tree search, or a baseline of the game."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pyspiel

from ludus.proto.errors import ConfigError, ExecutionError

from .games import LoadedGame
from .policies import SeatPolicy, make_seat_policies
from .search import search_move
from .seat_view import SeatView

Opponent = Callable[[pyspiel.State, random.Random], int]
"""Function from a state with the opponent's turn to the opponent's move."""


def _choose_random(state: pyspiel.State, rng: random.Random) -> int:
    legal_actions = state.legal_actions()
    return legal_actions[int(rng.random() * len(legal_actions))]


def _choose_first(state: pyspiel.State, rng: random.Random) -> int:
    return state.legal_actions()[0]


def _choose_last(state: pyspiel.State, rng: random.Random) -> int:
    return state.legal_actions()[-1]


def _choose_middle(state: pyspiel.State, rng: random.Random) -> int:
    legal_actions = state.legal_actions()
    return legal_actions[len(legal_actions) // 2]


_SEARCH_NAME = "mcts"
_DEFAULT_NUM_SIMULATIONS = 100
_MAX_NUM_SIMULATIONS = 100_000

_RULE_OPPONENTS: dict[str, Opponent] = {
    "random": _choose_random,
    "first": _choose_first,
    "last": _choose_last,
    "middle": _choose_middle,
}


def make_opponent(opponent: str | SeatPolicy, loaded_game: LoadedGame) -> Opponent:
    """Return the opponent with a name, or an opponent that plays a policy from its seat's view.

    Raises:
        ConfigError: The name is unknown or does not fit the game.
    """
    if not isinstance(opponent, str):
        return _make_policy_opponent(opponent, loaded_game)
    if opponent in _RULE_OPPONENTS:
        return _RULE_OPPONENTS[opponent]
    if is_search(opponent):
        return _make_search_opponent(opponent, loaded_game)
    policies = make_seat_policies(loaded_game)
    if opponent not in policies:
        names = ", ".join(
            dict.fromkeys([*_RULE_OPPONENTS, f"{_SEARCH_NAME}(SIMULATIONS)", *policies])
        )
        raise ConfigError(
            f"there is no opponent {opponent!r}; set opponent (OPENSPIEL_OPPONENT_POLICY) to one "
            f"of {names}"
        )
    return _make_policy_opponent(policies[opponent], loaded_game)


def is_search(opponent: str | SeatPolicy) -> bool:
    """Return True for a tree search, which needs more than about a millisecond per move."""
    return isinstance(opponent, str) and opponent.partition("(")[0] == _SEARCH_NAME


def _make_search_opponent(opponent: str, loaded_game: LoadedGame) -> Opponent:
    """Return a tree search with the number of simulations in the name.

    Raises:
        ConfigError: The number is out of range, or the game has hidden information or chance.
    """
    match = re.fullmatch(rf"{_SEARCH_NAME}(?:\((\d{{1,6}})\))?", opponent)
    num_simulations = int(match[1] or _DEFAULT_NUM_SIMULATIONS) if match else 0
    if not 1 <= num_simulations <= _MAX_NUM_SIMULATIONS:
        raise ConfigError(
            f"the opponent {_SEARCH_NAME}(N) needs 1 to {_MAX_NUM_SIMULATIONS} simulations per "
            f"move, got {opponent!r}"
        )
    if not loaded_game.has_perfect_information:
        raise ConfigError(
            f"the opponent {_SEARCH_NAME} would see hidden cards or moves of {loaded_game.name!r}; "
            "choose another opponent"
        )

    def play(state: pyspiel.State, rng: random.Random) -> int:
        return search_move(loaded_game.game, state, rng, num_simulations)

    return play


def _make_policy_opponent(policy: SeatPolicy, loaded_game: LoadedGame) -> Opponent:
    views = [SeatView(loaded_game, player) for player in range(loaded_game.num_players)]

    def play(state: pyspiel.State, rng: random.Random) -> int:
        observation = views[state.current_player()].observe(state)
        action_id = policy(observation, rng)
        if action_id not in observation.legal_actions:
            raise ExecutionError(
                f"the opponent's policy must return a legal move, one of "
                f"{observation.legal_actions}, got {action_id!r}; fix the policy"
            )
        return action_id

    return play
