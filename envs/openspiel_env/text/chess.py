"""Text of chess: the board with ranks and files. The response is a move in standard notation."""

from __future__ import annotations

from ..games import LoadedGame
from ..models import OpenSpielObservation
from .generic import GenericRenderer
from .renderer import TextStyle

_COLORS = ("Black", "White")  # by seat
_FILES = "a b c d e f g h"


class ChessRenderer(GenericRenderer):
    """Renderer that draws the board and names the player's colour."""

    def __init__(self, loaded_game: LoadedGame, player: int, style: TextStyle) -> None:
        super().__init__(loaded_game, player, style)
        self.rules = (
            f"You play chess as {_COLORS[player]} against one opponent; White moves first. "
            "Checkmate wins (reward 1) and being checkmated loses (-1); stalemate, a threefold "
            "repetition and 50 moves without a capture or a pawn move are draws (0). On the board, "
            "capital letters are White's pieces, small letters Black's: K king, Q queen, R rook, "
            "B bishop, N knight, P pawn; a dot is a free square. Files run from a to h, ranks from "
            "1 to 8; White begins on ranks 1 and 2. Answer with one of the listed moves in "
            "standard notation."
        )

    def draw(self, observation: OpenSpielObservation) -> str:
        """Return the board, with its ranks and files, and the rights to castle."""
        placement, _, castling, en_passant, *_ = observation.metadata["view"].split()
        lines = [
            f"{8 - index} {' '.join(_expand(row))}"
            for index, row in enumerate(placement.split("/"))
        ]
        rights = [
            f"{color} may still castle on the {side}."
            for letter, color, side in (
                ("K", "White", "king's side"),
                ("Q", "White", "queen's side"),
                ("k", "Black", "king's side"),
                ("q", "Black", "queen's side"),
            )
            if letter in castling
        ]
        if en_passant != "-":
            rights.append(f"A pawn can be captured en passant on {en_passant}.")
        return "\n".join([*lines, f"  {_FILES}", *([" ".join(rights)] if rights else [])])

    def list_last_moves(self, observation: OpenSpielObservation) -> list[str]:
        """Return the opponent's latest move."""
        moves = observation.metadata["last_moves"]
        return [f"{_COLORS[player]}'s last move: {name}." for player, name in moves]


def _expand(row: str) -> str:
    return "".join("." * int(square) if square.isdigit() else square for square in row)
