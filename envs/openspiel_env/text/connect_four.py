"""Text of connect four: the board. The response is the number of a column."""

from __future__ import annotations

from ..games import LoadedGame
from ..models import OpenSpielObservation
from .boards import read_cells, split_rows
from .renderer import GameRenderer, TextStyle

PIECES = "xo."
"""Pieces in the order of the tensor's planes; a dot is a free cell."""
_MARKS = "xo"  # mark of each seat


class ConnectFourRenderer(GameRenderer):
    """Renderer that shows the board, from the top row, and the player's mark."""

    def __init__(self, loaded_game: LoadedGame, player: int, style: TextStyle) -> None:
        super().__init__(loaded_game, player, style)
        _, _, self._num_columns = loaded_game.game.observation_tensor_shape()
        self.action_names = tuple(str(column + 1) for column in range(self._num_columns))
        winning_length = loaded_game.game.get_parameters().get("x_in_row", 4)
        self.rules = (
            "You play connect four. Players take turns to drop a piece into a column that is not "
            "full, x first; it falls to the lowest free cell. The first player with "
            f"{winning_length} pieces in an unbroken row, column or diagonal wins. A full board is "
            f"a draw. Columns are numbered 1 to {self._num_columns} from the left."
        )

    def summarize(self, observation: OpenSpielObservation) -> str:
        """Return the rows, with "." for a free cell, and the player's mark."""
        # Spaces make every tokenizer split the cells.
        lines = [" ".join(row) for row in self._read_rows(observation)]
        return "\n".join([*lines, f"you {_MARKS[self.player]}"])

    def describe(self, observation: OpenSpielObservation) -> str:
        """Return the board under the numbers of its columns."""
        lines = [" ".join(row) for row in (self.action_names, *self._read_rows(observation))]
        if observation.game_phase == "terminal":
            return "\n".join(["The game is over.", *lines])
        free_columns = ", ".join(self.list_legal_names(observation))
        question = f"You are {_MARKS[self.player]}. Which column? Open: {free_columns}."
        return "\n".join([*lines, question])

    def _read_rows(self, observation: OpenSpielObservation) -> list[str]:
        # OpenSpiel's first row is the bottom row.
        return split_rows(read_cells(observation.info_state, PIECES), self._num_columns)[::-1]
