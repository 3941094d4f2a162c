"""Text of Leduc poker: the cards, the chips and the moves. The response is CALL, RAISE or FOLD."""

from __future__ import annotations

import re

from ..games import LoadedGame
from ..models import OpenSpielObservation
from .generic import GenericRenderer
from .renderer import TextStyle

_FIELD_PATTERN = re.compile(r"\[(\w+):? ?([^\]]*)\]")
_MOVE_NAMES = ("fold", "call", "raise")


class LeducPokerRenderer(GenericRenderer):
    """Renderer that shows the player's card and the public state, never another private card."""

    def __init__(self, loaded_game: LoadedGame, player: int, style: TextStyle) -> None:
        super().__init__(loaded_game, player, style)
        num_players = loaded_game.num_players
        num_ranks = num_players + 1
        self._ranks = ("J", "Q", "K") if num_ranks == 3 else _number_ranks(num_ranks)
        parameters = loaded_game.game.get_parameters()
        self._num_suits = 1 if parameters["suit_isomorphism"] else 2
        self.rules = (
            f"You play Leduc poker with {num_players} players. The cards are two each of "
            f"{', '.join(self._ranks)}, from low to high. Each player puts 1 chip in the pot and "
            "gets one hidden card. In each of two betting rounds, players in turn Fold (give up), "
            "Call (match the highest bet, or check if there is none) or Raise, by 2 chips in "
            "round 1 and 4 in round 2, with at most two raises a round. Before round 2 one card "
            "is turned up for all. A pair with it wins, else the higher card; equal hands share "
            f"the pot. You are player {player + 1} of {num_players}. Your reward at the end is "
            f"the chips that you won or lost, at most {loaded_game.game.max_utility():g}."
        )

    def draw(self, observation: OpenSpielObservation) -> str:
        """Return the round, the cards, the chips and the moves in words."""
        fields = dict(_FIELD_PATTERN.findall(observation.metadata["view"]))
        public = f"The open card: {self._name(fields['Public'])}. " if "Public" in fields else ""
        chips = fields["Money"].split()
        other_chips = [count for index, count in enumerate(chips) if index != self.player]
        rivals = "your opponent" if len(other_chips) == 1 else "the others"
        pot = f" Pot: {fields['Pot']} chips." if observation.game_phase != "terminal" else ""
        return (
            f"Round {fields['Round']}. Your card: {self._name(fields['Private'])}. {public}"
            f"You have {chips[self.player]} chips, {rivals} {', '.join(other_chips)}.{pot}\n"
            f"Moves in round 1: {_name_moves(fields['Round1'])}. "
            f"Moves in round 2: {_name_moves(fields['Round2'])}."
        )

    def _name(self, card: str) -> str:
        return self._ranks[int(card) // self._num_suits]


def _name_moves(moves: str) -> str:
    return ", ".join(_MOVE_NAMES[int(move)] for move in moves.split()) or "none"


def _number_ranks(num_ranks: int) -> tuple[str, ...]:
    return tuple(str(rank + 1) for rank in range(num_ranks))
