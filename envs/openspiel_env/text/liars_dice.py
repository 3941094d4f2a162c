"""Text of liar's dice: the player's dice and the bids. The response is a bid or Liar."""

from __future__ import annotations

from ..games import LoadedGame
from ..models import OpenSpielObservation
from .generic import GenericRenderer
from .renderer import TextStyle


class LiarsDiceRenderer(GenericRenderer):
    """Renderer that shows the player's dice and the bids, never another player's dice."""

    def __init__(self, loaded_game: LoadedGame, player: int, style: TextStyle) -> None:
        super().__init__(loaded_game, player, style)
        parameters = loaded_game.game.get_parameters()
        num_players, sides = loaded_game.num_players, parameters["dice_sides"]
        num_dice = parameters["numdice"]
        dice = "one die" if num_dice == 1 else f"{num_dice} dice"
        self.rules = (
            f"You play liar's dice with {num_players} players, as player {player + 1}. Each player "
            f"rolls {dice} with sides 1 to {sides}, which only that player sees. "
            "Players take turns to bid: 2-5 says that the dice of all players show at least two "
            f"fives. A {sides} counts as any number. The listed bids are those above the latest "
            "bid. Liar doubts the latest bid and ends the game: its bidder wins if it is true, "
            "else the doubter wins. Your reward at the end is 1 if you win and -1 if you lose."
        )

    def draw(self, observation: OpenSpielObservation) -> str:
        """Return the player's dice and all bids."""
        words = observation.metadata["view"].split()
        dice = ", ".join(words[0])
        bids = ", ".join(words[1:]) or "none"
        return f"Your dice: {dice}. Bids so far: {bids}."
