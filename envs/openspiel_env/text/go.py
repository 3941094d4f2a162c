"""Text of Go: the board with its columns and rows. The response is a point or pass."""

from __future__ import annotations

from collections.abc import Sequence

from ..games import LoadedGame
from ..models import OpenSpielObservation
from .generic import GenericRenderer
from .renderer import TextStyle

_COLORS = ("Black", "White")  # by seat
_POINTS = str.maketrans("+", ".")


class GoRenderer(GenericRenderer):
    """Renderer that draws the board and names points without the player's colour."""

    def __init__(self, loaded_game: LoadedGame, player: int, style: TextStyle) -> None:
        super().__init__(loaded_game, player, style)
        game = loaded_game.game
        parameters = game.get_parameters()
        size = parameters["board_size"]
        self.rules = (
            f"You play Go as {_COLORS[player]} on a board of {size} by {size} points; X is a black "
            "stone, O a white stone, a dot a free point. In turn, players place one stone on a "
            "free point or pass. Stones of one colour that touch along lines are a group; a group "
            "that touches no free point is captured and removed. You may not capture yourself "
            "or repeat an earlier board. Two passes in a row, or "
            f"{game.max_game_length()} moves, end the game. The score is a player's stones and the "
            f"free points that only this player surrounds; White gets {parameters['komi']:g} more. "
            "The higher score wins (reward 1, the loser -1)."
        )

    def draw(self, observation: OpenSpielObservation) -> str:
        """Return the board, with the letters of columns and the numbers of rows."""
        *rows, letters = observation.metadata["view"].split("\n\n", 1)[1].splitlines()
        lines = []
        for row in rows:
            number, points = row.split()
            lines.append(f"{number:>2} {' '.join(points.translate(_POINTS))}")
        return "\n".join([*lines, f"   {' '.join(letters.strip().lower())}"])

    def ask(self, observation: OpenSpielObservation) -> str:
        """Return the form of a move; a list of all free points would repeat the board."""
        names = self.list_legal_names(observation)
        return (
            f"It is your turn as {_COLORS[self.player]}. You may pass or choose one of "
            f"{len(names) - 1} free points, for example {names[0]}."
        )

    def list_last_moves(self, observation: OpenSpielObservation) -> list[str]:
        """Return the opponent's latest move."""
        moves = observation.metadata["last_moves"]
        return [
            f"{_COLORS[player]}'s last move: {name.partition(' ')[2].lower()}."
            for player, name in moves
        ]

    def list_legal_names(self, observation: OpenSpielObservation) -> Sequence[str]:
        """Return the points; in the compact style, OpenSpiel's strings."""
        names = super().list_legal_names(observation)
        if self.style == "compact":
            return names
        return [name.partition(" ")[2].lower() for name in names]
