"""Text of any other game: OpenSpiel's strings for the situation and the moves."""

from __future__ import annotations

from collections.abc import Sequence

from ..games import LoadedGame
from ..models import OpenSpielObservation
from .renderer import GameRenderer, TextStyle


class GenericRenderer(GameRenderer):
    """Renderer that shows OpenSpiel's string for the seat and lists the legal moves."""

    needs_text = True

    def __init__(self, loaded_game: LoadedGame, player: int, style: TextStyle) -> None:
        super().__init__(loaded_game, player, style)
        seat = f", as player {player} of players 0 to {loaded_game.num_players - 1}"
        turn_note = (
            " Moves count once all players have chosen." if loaded_game.is_turn_based else ""
        )
        self.rules = (
            "You play the game "
            f"{loaded_game.long_name}{seat if loaded_game.num_players > 1 else ''}. Each message "
            f"shows the game as you see it, then your legal moves.{turn_note}"
        )

    def summarize(self, observation: OpenSpielObservation) -> str:
        """Return OpenSpiel's string and the legal moves, or that the game is over."""
        is_over = observation.game_phase == "terminal"
        last_line = (
            "over" if is_over else f"moves: {' | '.join(self.list_legal_names(observation))}"
        )
        return f"{observation.metadata['view']}\n{last_line}"

    def describe(self, observation: OpenSpielObservation) -> str:
        """Return OpenSpiel's string and the legal moves, or that the game is over."""
        view = observation.metadata["view"]
        if observation.game_phase == "terminal":
            return f"The game is over.\n{view}"
        return f"{view}\nYour legal moves: {' | '.join(self.list_legal_names(observation))}"

    def list_legal_names(self, observation: OpenSpielObservation) -> Sequence[str]:
        """Return OpenSpiel's strings for the legal moves."""
        return observation.metadata["answers"]

    def list_move_names(self, observation: OpenSpielObservation) -> Sequence[str]:
        """Return the legal moves. Other moves cannot be listed."""
        return self.list_legal_names(observation)
