"""Connect four as text: the board, answered with the number of a column."""

from __future__ import annotations

from ..games import LoadedGame
from ..models import OpenSpielObservation
from .boards import cells, rows
from .renderer import GameRenderer, TextStyle

PIECES = "xo."
"""In the order of the tensor's planes; a dot for a free cell."""
_MARKS = "xo"  # by seat


class ConnectFourRenderer(GameRenderer):
    """Shows the board, top row first, and whose mark the player has."""

    def __init__(self, loaded: LoadedGame, player: int, style: TextStyle) -> None:
        super().__init__(loaded, player, style)
        _, _, self._num_columns = loaded.game.observation_tensor_shape()
        self.words = tuple(str(column + 1) for column in range(self._num_columns))
        in_a_row = loaded.game.get_parameters().get("x_in_row", 4)
        self.rules = (
            "You play connect four. Players take turns to drop a piece into a column that is not "
            f"full, x first; it falls to the lowest free cell. {in_a_row} of one's own pieces in "
            "an unbroken row, column or diagonal win. A full board is a draw. Columns are "
            f"numbered 1 to {self._num_columns} from the left."
        )

    def brief(self, observation: OpenSpielObservation) -> str:
        """The rows with "." for a free cell, and the player's mark."""
        # Spaces between cells make each a word of its own, whatever the tokenizer.
        lines = [" ".join(row) for row in self._rows(observation)]
        return "\n".join([*lines, f"you {_MARKS[self.player]}"])

    def prose(self, observation: OpenSpielObservation) -> str:
        """The board under the numbers of its columns."""
        lines = [" ".join(row) for row in (self.words, *self._rows(observation))]
        if observation.game_phase == "terminal":
            return "\n".join(["The game is over.", *lines])
        open_columns = ", ".join(self.answers(observation))
        question = f"You are {_MARKS[self.player]}. Which column? Open: {open_columns}."
        return "\n".join([*lines, question])

    def _rows(self, observation: OpenSpielObservation) -> list[str]:
        # OpenSpiel counts rows from the bottom.
        return rows(cells(observation.info_state, PIECES), self._num_columns)[::-1]
