"""Text of 2048: the board. The response is the direction of a slide."""

from __future__ import annotations

from ..games import LoadedGame
from ..models import OpenSpielObservation
from .generic import GenericRenderer
from .renderer import TextStyle


class TwentyFortyEightRenderer(GenericRenderer):
    """Renderer that explains 2048 and shows free cells as dots."""

    def __init__(self, loaded_game: LoadedGame, player: int, style: TextStyle) -> None:
        super().__init__(loaded_game, player, style)
        max_tile = loaded_game.game.get_parameters()["max_tile"]
        goal = f", or when a tile reaches {max_tile}" if max_tile > 0 else ""
        self.rules = (
            "You play 2048 alone on a board of 4 by 4 cells. Each move slides all tiles Up, Right, "
            "Down or Left as far as they go. Two equal tiles that meet merge into one of twice the "
            "value, and you earn that value as a reward. After each move a tile of 2 or 4 appears "
            "in a random free cell. The game ends when no move changes the board"
            f"{goal}. Your score is the sum of your rewards. A dot is a free cell."
        )

    def draw(self, observation: OpenSpielObservation) -> str:
        """Return the rows of the board."""
        rows = [line.split() for line in observation.metadata["view"].splitlines()]
        return "\n".join(
            "".join(f"{'.' if tile == '0' else tile:>6}" for tile in row) for row in rows
        )
