"""OpenSpiel games, loaded by name, with the properties that a seat needs."""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyspiel

from ludus.env import ReturnRange
from ludus.proto.errors import ConfigError, NotFoundError

from .snapshots import SnapshotEncoder

_Dynamics = pyspiel.GameType.Dynamics
_Information = pyspiel.GameType.Information

UNIFORM_CHANCE_GAMES = frozenset({"blackjack", "catch", "kuhn_poker", "leduc_poker"})
"""Games whose chance events are always equally likely. An index is drawn instead of an event. This
avoids OpenSpiel's list of probabilities, which takes most of the time of a step."""

BINARY_TENSOR_GAMES = frozenset({"blackjack", "catch", "connect_four", "tic_tac_toe"})
"""Games with observation tensors of only zeros and ones, and without an information-state tensor.
Their observations can be stored as bytes."""

PUBLIC_MOVE_GAMES = frozenset(
    {"kuhn_poker", "leduc_poker", "liars_dice", "repeated_leduc_poker", "universal_poker"}
)
"""Games with hidden cards or dice but public moves."""

SLOW_GAMES = frozenset({"bridge", "bridge_uncontested_bidding", "tiny_bridge_2p", "yacht"})
"""Games that may need more than about a millisecond between two moves of a seat."""


@dataclass(frozen=True, slots=True)
class LoadedGame:
    """A sequential game and the properties that a seat needs."""

    name: str
    """Requested name, for example "kuhn_poker" or "kuhn_poker(players=3)"."""
    params: dict[str, Any]
    """Requested parameters."""
    game: pyspiel.Game
    short_name: str
    """OpenSpiel's name, without parameters."""
    long_name: str
    num_players: int
    is_turn_based: bool
    """True if simultaneous moves were converted to turns."""
    has_uniform_chance: bool
    snapshot_encoder: SnapshotEncoder | None
    """Converter of observations to bytes, for binary tensors; otherwise None."""
    has_perfect_information: bool
    shows_moves: bool
    """False if a player may not see another player's moves."""
    has_random_seed: bool
    """True if OpenSpiel itself draws random numbers."""
    can_be_won_and_lost: bool
    """True if returns can be positive and negative. In other games their sign has no meaning."""
    return_range: ReturnRange | None
    """Lowest and highest utility; None if moves have rewards or the utilities have no range."""

    def with_seed(self, seed: int) -> pyspiel.Game:
        """Return the game with a 31-bit seed for OpenSpiel's own random numbers."""
        return pyspiel.load_game(self.short_name, {**self.game.get_parameters(), "rng_seed": seed})


def load_game(name: str, params: Mapping[str, Any] | None = None) -> LoadedGame:
    """Load a game, and convert simultaneous moves to turns.

    Args:
        name: Registered name, also with parameters: "kuhn_poker(players=3)".

    Raises:
        NotFoundError: The game does not exist.
        ConfigError: The parameters are invalid, or the game cannot be played in turns.
    """
    # Games are immutable and some are slow to build, so sessions share them.
    return _load_cached_game(name, json.dumps(dict(params or {}), sort_keys=True))


@functools.lru_cache(maxsize=32)
def _load_cached_game(name: str, params_json: str) -> LoadedGame:
    params = json.loads(params_json)
    short_name = _remove_parameters(name)
    _require_registered(short_name)
    if not params and name == short_name:
        _require_default_parameters(short_name)
    try:
        game = pyspiel.load_game(name, params) if params else pyspiel.load_game(name)
    except (pyspiel.SpielError, TypeError) as error:
        raise ConfigError(
            f"OpenSpiel cannot load the game {name!r} with the parameters {params}: {error}; fix "
            "game or game_params"
        ) from error
    game_type = game.get_type()
    sequential_game = _make_sequential(name, game)
    has_perfect_information = (
        game_type.information == _Information.PERFECT_INFORMATION and sequential_game is game
    )
    return LoadedGame(
        name=name,
        params=params,
        game=sequential_game,
        short_name=short_name,
        long_name=game_type.long_name,
        num_players=game.num_players(),
        is_turn_based=sequential_game is not game,
        has_uniform_chance=short_name in UNIFORM_CHANCE_GAMES,
        snapshot_encoder=SnapshotEncoder(sequential_game)
        if short_name in BINARY_TENSOR_GAMES
        else None,
        has_perfect_information=has_perfect_information,
        shows_moves=has_perfect_information or short_name in PUBLIC_MOVE_GAMES,
        has_random_seed="rng_seed" in game_type.parameter_specification,
        can_be_won_and_lost=game.min_utility() < 0 < game.max_utility(),
        return_range=_find_return_range(game),
    )


def _find_return_range(game: pyspiel.Game) -> ReturnRange | None:
    lowest, highest = game.min_utility(), game.max_utility()
    is_final = game.get_type().reward_model == pyspiel.GameType.RewardModel.TERMINAL
    if not is_final or not -math.inf < lowest < highest < math.inf:
        return None
    return ReturnRange(lowest, highest)


def _require_registered(short_name: str) -> None:
    if short_name.startswith("python_"):
        importlib.import_module("open_spiel.python.games")  # registers the games written in Python
    names = pyspiel.registered_names()
    if short_name in names:
        return
    similar_names = difflib.get_close_matches(short_name, names, n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(similar_names)}?"
        if similar_names
        else "`ludus env list --family openspiel` prints all games"
    )
    raise NotFoundError(f"there is no OpenSpiel game {short_name!r}; {hint}")


def list_playable_games() -> list[pyspiel.GameType]:
    """Return the types of the games that can be played without parameters."""
    return [
        game_type
        for game_type in pyspiel.registered_games()
        if game_type.default_loadable
        and not game_type.action_structs_only
        and game_type.dynamics != _Dynamics.MEAN_FIELD
    ]


def _require_default_parameters(short_name: str) -> None:
    """Check that a game can be loaded by its name alone.

    Some others end the process with a C++ exception that names no parameter.
    """
    for game_type in pyspiel.registered_games():
        if game_type.short_name == short_name and not game_type.default_loadable:
            names = ", ".join(game_type.parameter_specification) or "parameters"
            raise ConfigError(
                f"the OpenSpiel game {short_name!r} needs parameters; set some of {names}, for"
                f" example --option 'game={short_name}(NAME=VALUE)', or choose another game"
            )


def _make_sequential(name: str, game: pyspiel.Game) -> pyspiel.Game:
    game_type = game.get_type()
    if game_type.action_structs_only:
        raise ConfigError(
            f"the moves of {name!r} are structures, not numbers, which is not supported; choose "
            "another game"
        )
    if game_type.dynamics == _Dynamics.SEQUENTIAL:
        return game
    if game_type.dynamics == _Dynamics.SIMULTANEOUS:
        return pyspiel.convert_to_turn_based(game)
    raise ConfigError(f"{name!r} is a mean-field game, which is not supported; choose another game")


def is_slow(name: str) -> bool:
    """Return True if a move can take longer than about a millisecond."""
    return _remove_parameters(name) in SLOW_GAMES


def _remove_parameters(name: str) -> str:
    return name.partition("(")[0].strip()
