"""How language models see each game and answer: one face per game, a generic one for the rest."""

from __future__ import annotations

from typing import get_args

from ludus.proto.errors import ConfigError

from ..games import LoadedGame
from .blackjack import BlackjackFace
from .catch import CatchFace
from .connect_four import ConnectFourFace
from .face import GameFace, TextStyle
from .generic import GenericFace
from .kuhn_poker import KuhnPokerFace
from .tic_tac_toe import TicTacToeFace

__all__ = ["GameFace", "TextStyle", "make_face"]

_FACES: dict[str, type[GameFace]] = {
    "blackjack": BlackjackFace,
    "catch": CatchFace,
    "connect_four": ConnectFourFace,
    "kuhn_poker": KuhnPokerFace,
    "tic_tac_toe": TicTacToeFace,
}


def make_face(loaded: LoadedGame, player: int, style: TextStyle) -> GameFace:
    """The game's own face, or the generic one.

    Raises:
        ConfigError: there is no such style.
    """
    if style not in get_args(TextStyle):
        raise ConfigError(
            f"expected a text style out of {', '.join(get_args(TextStyle))}, got {style!r}; set "
            "text_style (OPENSPIEL_TEXT_STYLE) to one of them"
        )
    return _FACES.get(loaded.short_name, GenericFace)(loaded, player, style)
