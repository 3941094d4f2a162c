"""Tic-tac-toe as text: the board, answered with the number of a cell."""

from __future__ import annotations

from collections.abc import Sequence

from ..models import OpenSpielObservation
from .boards import cells, rows
from .renderer import GameRenderer

SIDE = 3
_PIECES = ".ox"  # the order of the tensor's planes
_MARKS = "xo"  # by seat


def board_of(info_state: Sequence[float]) -> str:
    """The nine cells, row by row, each one of ".xo"."""
    return cells(info_state, _PIECES)


class TicTacToeRenderer(GameRenderer):
    """Shows the board and whose mark the player has."""

    words = ("1", "2", "3", "4", "5", "6", "7", "8", "9")
    rules = (
        "You play tic-tac-toe on a board of three rows of three cells. The cells are numbered 1 "
        "to 9, row by row from the top left. Players take turns to mark a free cell, x first; "
        "three of one's own marks in a row, column or diagonal win. A full board is a draw."
    )

    def brief(self, observation: OpenSpielObservation) -> str:
        """The rows with "." for a free cell, and the player's mark."""
        # Spaces between cells make each a word of its own, whatever the tokenizer.
        lines = [" ".join(row) for row in rows(board_of(observation.info_state), SIDE)]
        return "\n".join([*lines, f"you {_MARKS[self.player]}"])

    def prose(self, observation: OpenSpielObservation) -> str:
        """The board with the numbers of the free cells."""
        board = board_of(observation.info_state)
        numbered = [
            word if mark == "." else mark for mark, word in zip(board, self.words, strict=True)
        ]
        lines = [" ".join(numbered[start : start + SIDE]) for start in range(0, len(board), SIDE)]
        if observation.game_phase == "terminal":
            return "\n".join(["The game is over.", *lines])
        mark = _MARKS[self.player]
        return "\n".join([*lines, f"You are {mark}. Which free cell do you mark?"])
