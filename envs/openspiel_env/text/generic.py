"""Text of any other game: OpenSpiel's strings for the situation and the moves."""

from __future__ import annotations

from collections.abc import Sequence

import pyspiel

from ..games import LoadedGame
from ..models import OpenSpielObservation
from .renderer import GameRenderer, TextStyle
from .words import NUMBER_WORDS

_ORDINAL_WORDS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_MAX_LISTED_MOVES = 100  # a new player cannot guess the names of unlisted moves
_NUM_EXAMPLES = 20


class GenericRenderer(GameRenderer):
    """Renderer that shows OpenSpiel's string for the seat and lists the legal moves."""

    needs_text = True

    def __init__(self, loaded_game: LoadedGame, player: int, style: TextStyle) -> None:
        super().__init__(loaded_game, player, style)
        sentences = [
            f"You play the game {loaded_game.long_name}{_describe_seat(loaded_game, player)}.",
            _describe_reward(loaded_game),
            f"A game has at most {loaded_game.game.max_game_length()} moves.",
            "Each message shows the game as you see it, then your legal moves.",
        ]
        if loaded_game.is_turn_based:
            sentences.append("Moves count once all players have chosen.")
        self.rules = " ".join(sentences)

    def summarize(self, observation: OpenSpielObservation) -> str:
        """Return OpenSpiel's string and the legal moves, or that the game is over."""
        is_over = observation.game_phase == "terminal"
        last_line = (
            "over" if is_over else f"moves: {' | '.join(self.list_legal_names(observation))}"
        )
        return f"{observation.metadata['view']}\n{last_line}"

    def describe(self, observation: OpenSpielObservation) -> str:
        """Return the latest moves of others, the game and the legal moves."""
        if observation.game_phase == "terminal":
            return "\n".join(
                ["The game is over.", *self.list_last_moves(observation), self.draw(observation)]
            )
        return "\n".join(
            [*self.list_last_moves(observation), self.draw(observation), self.ask(observation)]
        )

    def draw(self, observation: OpenSpielObservation) -> str:
        """Return the game as the seat sees it, by default OpenSpiel's string."""
        return str(observation.metadata["view"])

    def ask(self, observation: OpenSpielObservation) -> str:
        """Return the legal moves, or examples if there are many."""
        names = self.list_legal_names(observation)
        if len(names) <= _MAX_LISTED_MOVES:
            return f"It is your turn. Your legal moves: {' | '.join(names)}"
        examples = names[:: -(-len(names) // _NUM_EXAMPLES)]
        return (
            f"It is your turn. You have {len(names)} legal moves, among them: "
            f"{' | '.join(examples)}"
        )

    def list_last_moves(self, observation: OpenSpielObservation) -> list[str]:
        """Return one sentence for each public move of others since the seat's own move."""
        moves = observation.metadata.get("last_moves", [])
        if self.loaded_game.num_players == 2:
            return [f"Your opponent's move: {name}." for _, name in moves]
        return [f"Move of player {player + 1}: {name}." for player, name in moves]

    def list_legal_names(self, observation: OpenSpielObservation) -> Sequence[str]:
        """Return OpenSpiel's strings for the legal moves."""
        return observation.metadata["answers"]

    def list_move_names(self, observation: OpenSpielObservation) -> Sequence[str]:
        """Return the legal moves. Other moves cannot be listed."""
        return self.list_legal_names(observation)


def _describe_seat(loaded_game: LoadedGame, player: int) -> str:
    num_players = loaded_game.num_players
    if num_players == 1:
        return " alone"
    opponents = "one opponent" if num_players == 2 else f"{_count(num_players - 1)} others"
    seat = _ORDINAL_WORDS[player] if player < len(_ORDINAL_WORDS) else f"number {player + 1}"
    text = f" against {opponents}. You are the {seat} of {_count(num_players)} players"
    first_player = loaded_game.game.new_initial_state().current_player()
    if first_player >= 0 and not loaded_game.is_turn_based:
        text += " and move first" if first_player == player else " and do not move first"
    return f"{text}; where players are numbered from 0, you are {player}"


def _describe_reward(loaded_game: LoadedGame) -> str:
    game_type = loaded_game.game.get_type()
    lowest, highest = loaded_game.game.min_utility(), loaded_game.game.max_utility()
    if game_type.reward_model == pyspiel.GameType.RewardModel.TERMINAL:
        text = f"Your reward comes at the end, from {lowest:g} (worst) to {highest:g} (best)"
    else:
        text = f"Moves earn rewards, and their sum, from {lowest:g} to {highest:g}, is your score"
    if loaded_game.num_players == 1:
        return f"{text}."
    if game_type.utility == pyspiel.GameType.Utility.ZERO_SUM:
        return f"{text}; what one player wins, the others lose."
    if game_type.utility == pyspiel.GameType.Utility.IDENTICAL:
        return f"{text}; all players get the same."
    return f"{text}; the players' rewards need not sum to zero."


def _count(number: int) -> str:
    return NUMBER_WORDS[number] if number < len(NUMBER_WORDS) else str(number)
