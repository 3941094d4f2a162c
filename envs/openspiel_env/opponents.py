"""Who plays the other seats: players of few words, tree search, or the game's fixed policies."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pyspiel

from ludus.proto.errors import ConfigError, ExecutionError

from .games import LoadedGame
from .policies import Policy, seat_policies
from .search import search_move
from .seat_view import SeatView

Opponent = Callable[[pyspiel.State, random.Random], int]
"""From a state in which it is the opponent's turn to its move."""


def _play_random(state: pyspiel.State, rng: random.Random) -> int:
    legal_actions = state.legal_actions()
    return legal_actions[int(rng.random() * len(legal_actions))]


def _play_first(state: pyspiel.State, rng: random.Random) -> int:
    return state.legal_actions()[0]


def _play_last(state: pyspiel.State, rng: random.Random) -> int:
    return state.legal_actions()[-1]


def _play_middle(state: pyspiel.State, rng: random.Random) -> int:
    legal_actions = state.legal_actions()
    return legal_actions[len(legal_actions) // 2]


_SEARCH = "mcts"
_NUM_SIMULATIONS = 100
_MAX_SIMULATIONS = 100_000

_BY_LEGAL_ACTIONS: dict[str, Opponent] = {
    "random": _play_random,
    "first": _play_first,
    "last": _play_last,
    "middle": _play_middle,
}


def make_opponent(opponent: str | Policy, loaded: LoadedGame) -> Opponent:
    """The opponent of that name, or one that plays the given policy from its own seat's view.

    Raises:
        ConfigError: the name is unknown; raised now, not in the middle of a game.
    """
    if not isinstance(opponent, str):
        return _from_policy(opponent, loaded)
    if opponent in _BY_LEGAL_ACTIONS:
        return _BY_LEGAL_ACTIONS[opponent]
    if searches(opponent):
        return _searching(opponent, loaded)
    policies = seat_policies(loaded)
    if opponent not in policies:
        names = ", ".join(dict.fromkeys([*_BY_LEGAL_ACTIONS, f"{_SEARCH}(SIMULATIONS)", *policies]))
        raise ConfigError(
            f"expected an opponent out of {names}, got {opponent!r}; set opponent "
            "(OPENSPIEL_OPPONENT_POLICY) to one of them"
        )
    return _from_policy(policies[opponent], loaded)


def searches(opponent: str | Policy) -> bool:
    """True for an opponent that thinks for longer than about a millisecond."""
    return isinstance(opponent, str) and opponent.partition("(")[0] == _SEARCH


def _searching(opponent: str, loaded: LoadedGame) -> Opponent:
    """Tree search (`search.py`), with the number of simulations that the name says.

    Raises:
        ConfigError: its number is out of range, or the game hides something or draws lots.
    """
    found = re.fullmatch(rf"{_SEARCH}(?:\((\d{{1,6}})\))?", opponent)
    num_simulations = int(found[1] or _NUM_SIMULATIONS) if found else 0
    if not 1 <= num_simulations <= _MAX_SIMULATIONS:
        raise ConfigError(
            f"expected {_SEARCH}, or {_SEARCH}(N) with 1 to {_MAX_SIMULATIONS} simulations a move,"
            f" as opponent, got {opponent!r}"
        )
    if not loaded.has_perfect_information:
        raise ConfigError(
            f"expected a game without hidden cards or moves for the opponent {_SEARCH}, which would"
            f" look at them, got {loaded.name!r}; choose another opponent"
        )

    def play(state: pyspiel.State, rng: random.Random) -> int:
        return search_move(loaded.game, state, rng, num_simulations)

    return play


def _from_policy(policy: Policy, loaded: LoadedGame) -> Opponent:
    views = [SeatView(loaded, player) for player in range(loaded.num_players)]

    def play(state: pyspiel.State, rng: random.Random) -> int:
        observation = views[state.current_player()].observe(state)
        action_id = policy(observation, rng)
        if action_id not in observation.legal_actions:
            raise ExecutionError(
                f"expected a legal move of the opponent, one of {observation.legal_actions}, "
                f"got {action_id!r}; fix the opponent's policy"
            )
        return action_id

    return play
