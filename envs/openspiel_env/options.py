"""Options of the OpenSpiel environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import Field

from ludus.env.options import EnvironmentOptions, JsonOption

from .text.renderer import TextStyle


class OpenSpielOptions(EnvironmentOptions):
    """A game, the player's seat, the opponents and the text."""

    variable_suffixes: ClassVar[Mapping[str, str]] = {"opponent": "opponent_policy"}

    game: str = "catch"
    """Name of the game, also with parameters: `kuhn_poker(players=3)`."""
    game_params: JsonOption = Field(default_factory=dict)
    """Parameters of the game as a JSON object, for example `{"players": 3}`."""
    agent_player: int = Field(0, ge=0)
    """The player's seat."""
    opponent: str | Callable[..., Any] = "random"
    """Policy of the other seats: `random`, `first`, `last` or `middle` legal move; `mcts` or
    `mcts(500)`, a tree search with that number of simulations per move; or a baseline of the
    game. In Python also a function."""
    text_style: TextStyle = "compact"
    """`compact` shows the situation only; `rules` explains the game and asks for the move in tags;
    `brief` asks for the move alone, and in blackjack shows only what matters."""
