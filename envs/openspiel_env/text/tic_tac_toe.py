"""Text of tic-tac-toe: the board. The response is the number of a cell."""

from __future__ import annotations

from collections.abc import Sequence

from ..models import OpenSpielObservation
from .boards import read_cells, split_rows
from .renderer import GameRenderer

BOARD_SIZE = 3
_PIECES = ".ox"  # the order of the tensor's planes
_MARKS = "xo"  # mark of each seat


def read_board(info_state: Sequence[float]) -> str:
    """Return the nine cells, row by row, each one of ".xo"."""
    return read_cells(info_state, _PIECES)


class TicTacToeRenderer(GameRenderer):
    """Renderer that shows the board and the player's mark."""

    action_names = ("1", "2", "3", "4", "5", "6", "7", "8", "9")
    rules = (
        "You play tic-tac-toe on a board of three rows of three cells. The cells are numbered 1 "
        "to 9, row by row from the top left. Players take turns to mark a free cell, x first. "
        "The first player with three marks in a row, column or diagonal wins. A full board is a "
        "draw."
    )

    def summarize(self, observation: OpenSpielObservation) -> str:
        """Return the rows, with "." for a free cell, and the player's mark."""
        # Spaces make every tokenizer split the cells.
        lines = [
            " ".join(row) for row in split_rows(read_board(observation.info_state), BOARD_SIZE)
        ]
        return "\n".join([*lines, f"you {_MARKS[self.player]}"])

    def describe(self, observation: OpenSpielObservation) -> str:
        """Return the board with the numbers of the free cells."""
        board = read_board(observation.info_state)
        numbered_cells = [
            number if mark == "." else mark
            for mark, number in zip(board, self.action_names, strict=True)
        ]
        lines = [
            " ".join(numbered_cells[start : start + BOARD_SIZE])
            for start in range(0, len(board), BOARD_SIZE)
        ]
        if observation.game_phase == "terminal":
            return "\n".join(["The game is over.", *lines])
        mark = _MARKS[self.player]
        return "\n".join([*lines, f"You are {mark}. Which free cell do you mark?"])
