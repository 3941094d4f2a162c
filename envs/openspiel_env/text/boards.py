"""Boards in OpenSpiel's tensors: one plane of cells for each kind of piece."""

from __future__ import annotations

from collections.abc import Sequence


def cells(info_state: Sequence[float], pieces: str) -> str:
    """One character per cell: of `pieces`, the one whose plane marks the cell."""
    num_cells = len(info_state) // len(pieces)
    board = [""] * num_cells
    for plane, piece in enumerate(pieces):
        start = plane * num_cells
        for cell in range(num_cells):
            if info_state[start + cell]:
                board[cell] = piece
    return "".join(board)


def rows(board: str, num_columns: int) -> list[str]:
    """The board cut into rows."""
    return [board[start : start + num_columns] for start in range(0, len(board), num_columns)]
