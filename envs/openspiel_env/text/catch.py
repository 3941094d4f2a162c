"""Text of catch: the positions of ball and paddle. The response is LEFT, STAY or RIGHT."""

from __future__ import annotations

from collections.abc import Sequence

from ..games import LoadedGame
from ..models import OpenSpielObservation
from .renderer import GameRenderer, TextStyle

DEFAULT_NUM_COLUMNS = 5


def read_ball_and_paddle(
    info_state: Sequence[float], num_columns: int = DEFAULT_NUM_COLUMNS
) -> tuple[int, int, int]:
    """Return the columns of ball and paddle, from 0, and the steps until the ball lands."""
    marked_cells = [cell for cell, value in enumerate(info_state) if value]
    ball, paddle = marked_cells[0], marked_cells[-1]  # the same cell if the ball was caught
    num_steps = len(info_state) // num_columns - 1 - ball // num_columns
    return ball % num_columns, paddle % num_columns, num_steps


class CatchRenderer(GameRenderer):
    """Renderer that shows the columns of ball and paddle, and the height of the ball."""

    action_names = ("LEFT", "STAY", "RIGHT")

    def __init__(self, loaded_game: LoadedGame, player: int, style: TextStyle) -> None:
        super().__init__(loaded_game, player, style)
        _, self._num_columns = loaded_game.game.observation_tensor_shape()
        self.rules = (
            f"A ball falls in a field of {self._num_columns} columns, one row each turn. Your "
            "paddle on the bottom row moves one column LEFT or RIGHT each turn, or STAYs. You "
            "win if the paddle is under the ball when it lands."
        )

    def summarize(self, observation: OpenSpielObservation) -> str:
        """Return for example "ball 1 up 9 paddle 3". Columns are numbered from 1."""
        ball, paddle, num_steps = read_ball_and_paddle(observation.info_state, self._num_columns)
        return f"ball {ball + 1} up {num_steps} paddle {paddle + 1}"

    def describe(self, observation: OpenSpielObservation) -> str:
        """Return the columns of ball and paddle, and the height of the ball."""
        ball, paddle, num_steps = read_ball_and_paddle(observation.info_state, self._num_columns)
        if observation.game_phase == "terminal":
            outcome = "caught" if ball == paddle else "missed"
            return f"The game is over: you {outcome} the ball."
        return (
            f"The ball is in column {ball + 1}, {num_steps} rows above the paddle. The paddle "
            f"is in column {paddle + 1} of {self._num_columns}. LEFT, STAY or RIGHT?"
        )
