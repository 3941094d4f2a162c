"""How language models see each game and answer: a renderer per game, one for all others."""

from __future__ import annotations

from typing import get_args

from ludus.proto.errors import ConfigError

from ..games import LoadedGame
from .blackjack import BlackjackRenderer
from .catch import CatchRenderer
from .connect_four import ConnectFourRenderer
from .generic import GenericRenderer
from .kuhn_poker import KuhnPokerRenderer
from .renderer import GameRenderer, TextStyle
from .tic_tac_toe import TicTacToeRenderer

__all__ = ["GameRenderer", "TextStyle", "make_renderer"]

_RENDERERS: dict[str, type[GameRenderer]] = {
    "blackjack": BlackjackRenderer,
    "catch": CatchRenderer,
    "connect_four": ConnectFourRenderer,
    "kuhn_poker": KuhnPokerRenderer,
    "tic_tac_toe": TicTacToeRenderer,
}


def make_renderer(loaded: LoadedGame, player: int, style: TextStyle) -> GameRenderer:
    """The game's own renderer, or the generic one.

    Raises:
        ConfigError: there is no such style.
    """
    if style not in get_args(TextStyle):
        raise ConfigError(
            f"expected a text style out of {', '.join(get_args(TextStyle))}, got {style!r}; set "
            "text_style (OPENSPIEL_TEXT_STYLE) to one of them"
        )
    return _RENDERERS.get(loaded.short_name, GenericRenderer)(loaded, player, style)
