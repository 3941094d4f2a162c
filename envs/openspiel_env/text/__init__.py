"""Renderers: one for each of several games, and a generic one for all others."""

from __future__ import annotations

from ..games import LoadedGame
from .blackjack import BlackjackRenderer
from .catch import CatchRenderer
from .chess import ChessRenderer
from .connect_four import ConnectFourRenderer
from .generic import GenericRenderer
from .go import GoRenderer
from .kuhn_poker import KuhnPokerRenderer
from .leduc_poker import LeducPokerRenderer
from .liars_dice import LiarsDiceRenderer
from .renderer import GameRenderer, TextStyle
from .tic_tac_toe import TicTacToeRenderer
from .twenty_forty_eight import TwentyFortyEightRenderer

__all__ = ["GameRenderer", "TextStyle", "has_own_text", "make_renderer"]

_RENDERERS: dict[str, type[GameRenderer]] = {
    "2048": TwentyFortyEightRenderer,
    "blackjack": BlackjackRenderer,
    "catch": CatchRenderer,
    "chess": ChessRenderer,
    "connect_four": ConnectFourRenderer,
    "go": GoRenderer,
    "kuhn_poker": KuhnPokerRenderer,
    "leduc_poker": LeducPokerRenderer,
    "liars_dice": LiarsDiceRenderer,
    "tic_tac_toe": TicTacToeRenderer,
}


def has_own_text(short_name: str) -> bool:
    """Return True if a game has a separate renderer, which explains the game."""
    return short_name in _RENDERERS


def make_renderer(loaded_game: LoadedGame, player: int, style: TextStyle) -> GameRenderer:
    """Return the renderer of a game."""
    return _RENDERERS.get(loaded_game.short_name, GenericRenderer)(loaded_game, player, style)
