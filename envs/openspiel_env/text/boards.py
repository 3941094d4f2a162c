"""Boards in OpenSpiel's tensors, which have one plane of cells per kind of piece."""

from __future__ import annotations

from collections.abc import Sequence


def read_cells(info_state: Sequence[float], pieces: str) -> str:
    """Return one character of `pieces` per cell: the piece whose plane marks the cell."""
    num_cells = len(info_state) // len(pieces)
    board = [""] * num_cells
    for plane, piece in enumerate(pieces):
        start = plane * num_cells
        for cell in range(num_cells):
            if info_state[start + cell]:
                board[cell] = piece
    return "".join(board)


def split_rows(board: str, num_columns: int) -> list[str]:
    """Return the rows of the board."""
    return [board[start : start + num_columns] for start in range(0, len(board), num_columns)]
