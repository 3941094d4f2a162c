"""Loading OpenSpiel games: any sequential one by name, with what a seat must know of it."""

from __future__ import annotations

import difflib
import functools
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyspiel

from ludus.proto.errors import ConfigError, NotFoundError

from .snapshots import Snapshots

_Dynamics = pyspiel.GameType.Dynamics
_Information = pyspiel.GameType.Information

UNIFORM_CHANCE_GAMES = frozenset({"blackjack", "catch", "kuhn_poker", "leduc_poker"})
"""Games whose chance events are always equally likely: drawing by index spares OpenSpiel from
listing a probability per event, which would be most of the cost of a step."""

BINARY_TENSOR_GAMES = frozenset({"blackjack", "catch", "connect_four", "tic_tac_toe"})
"""Games whose observation tensors hold only zeros and ones, and which have no tensor of the
information state: what a seat sees can be kept as bytes."""

PUBLIC_MOVE_GAMES = frozenset(
    {"kuhn_poker", "leduc_poker", "liars_dice", "repeated_leduc_poker", "universal_poker"}
)
"""Games with hidden cards or dice whose moves everybody sees."""

SLOW_GAMES = frozenset({"bridge", "bridge_uncontested_bidding", "tiny_bridge_2p", "yacht"})
"""Games that may think for longer than about a millisecond between two moves of a seat."""


@dataclass(frozen=True, slots=True)
class LoadedGame:
    """A sequential game and what a player's seat must know of it."""

    name: str
    """As it was asked for, for example "kuhn_poker" or "kuhn_poker(players=3)"."""
    params: dict[str, Any]
    """As they were asked for."""
    game: pyspiel.Game
    short_name: str
    """OpenSpiel's name, without parameters."""
    long_name: str
    num_players: int
    is_turn_based: bool
    """True where players who would move at once are asked one after another instead."""
    has_uniform_chance: bool
    snapshots: Snapshots | None
    """Takes what a seat sees as bytes, where its tensor holds only zeros and ones."""
    has_perfect_information: bool
    shows_moves: bool
    """False where a player may not see what another one did."""
    has_random_seed: bool
    """True where OpenSpiel itself draws random numbers."""
    can_be_won_and_lost: bool
    """True where returns lie on both sides of 0: in other games their sign says nothing."""

    def reseeded(self, seed: int) -> pyspiel.Game:
        """The game with OpenSpiel's own random numbers fixed by a 31-bit seed."""
        return pyspiel.load_game(self.short_name, {**self.game.get_parameters(), "rng_seed": seed})


def load_game(name: str, params: Mapping[str, Any] | None = None) -> LoadedGame:
    """The game of that name, made sequential where its players move at once.

    Args:
        name: a registered name, also with parameters in brackets: "kuhn_poker(players=3)".

    Raises:
        NotFoundError: there is no game of that name.
        ConfigError: the parameters do not fit, or the game cannot be played turn by turn.
    """
    # Games never change and some take long to build: one per process, not one per session.
    return _load_game(name, json.dumps(dict(params or {}), sort_keys=True))


@functools.lru_cache(maxsize=32)
def _load_game(name: str, params_json: str) -> LoadedGame:
    params = json.loads(params_json)
    short_name = _short_name(name)
    _require_registered(short_name)
    try:
        game = pyspiel.load_game(name, params) if params else pyspiel.load_game(name)
    except (pyspiel.SpielError, TypeError) as error:
        raise ConfigError(
            f"expected parameters that OpenSpiel's game {short_name!r} takes, got {name!r} "
            f"with {params}: {error}; fix game or game_params"
        ) from error
    kind = game.get_type()
    sequential_game = _made_sequential(name, game)
    has_perfect_information = (
        kind.information == _Information.PERFECT_INFORMATION and sequential_game is game
    )
    return LoadedGame(
        name=name,
        params=params,
        game=sequential_game,
        short_name=short_name,
        long_name=kind.long_name,
        num_players=game.num_players(),
        is_turn_based=sequential_game is not game,
        has_uniform_chance=short_name in UNIFORM_CHANCE_GAMES,
        snapshots=Snapshots(sequential_game) if short_name in BINARY_TENSOR_GAMES else None,
        has_perfect_information=has_perfect_information,
        shows_moves=has_perfect_information or short_name in PUBLIC_MOVE_GAMES,
        has_random_seed="rng_seed" in kind.parameter_specification,
        can_be_won_and_lost=game.min_utility() < 0 < game.max_utility(),
    )


def _require_registered(short_name: str) -> None:
    if short_name.startswith("python_"):
        importlib.import_module("open_spiel.python.games")  # registers them
    names = pyspiel.registered_names()
    if short_name in names:
        return
    close = difflib.get_close_matches(short_name, names, n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(close)}?" if close else "pyspiel.registered_names() lists all"
    )
    raise NotFoundError(f"expected the name of an OpenSpiel game, got {short_name!r}; {hint}")


def _made_sequential(name: str, game: pyspiel.Game) -> pyspiel.Game:
    kind = game.get_type()
    if kind.action_structs_only:
        raise ConfigError(
            f"expected a game whose moves are numbered, got {name!r}, whose moves are "
            "structures; choose another game"
        )
    if kind.dynamics == _Dynamics.SEQUENTIAL:
        return game
    if kind.dynamics == _Dynamics.SIMULTANEOUS:
        return pyspiel.convert_to_turn_based(game)
    raise ConfigError(
        f"expected a game for separate players, got {name!r}, a mean-field game, whose one "
        "player stands for a population; choose another game"
    )


def is_slow(name: str) -> bool:
    """True where a move can take longer than about a millisecond."""
    return _short_name(name) in SLOW_GAMES


def _short_name(name: str) -> str:
    return name.partition("(")[0].strip()
