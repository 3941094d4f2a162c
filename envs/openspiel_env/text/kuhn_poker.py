"""Text of Kuhn poker: the player's card and the moves so far. The response is PASS or BET."""

from __future__ import annotations

from ..games import LoadedGame
from ..models import OpenSpielObservation
from .renderer import GameRenderer, TextStyle

_MOVE_NAMES = ("PASS", "BET")


class KuhnPokerRenderer(GameRenderer):
    """Renderer that shows the player's card and the moves, never another player's card."""

    action_names = _MOVE_NAMES

    def __init__(self, loaded_game: LoadedGame, player: int, style: TextStyle) -> None:
        super().__init__(loaded_game, player, style)
        num_cards = loaded_game.num_players + 1
        self._cards = ("J", "Q", "K") if num_cards == 3 else _number_cards(num_cards)
        self.rules = (
            f"You play Kuhn poker with {loaded_game.num_players} players and {num_cards} cards, "
            f"from low to high {', '.join(self._cards)}. Each player antes one chip and gets one "
            "card. In turn, players PASS or BET one chip. Once a player has bet, BET calls and "
            "PASS folds, and each other player has one more turn. The highest card among those who "
            "did not fold wins the pot."
        )

    def summarize(self, observation: OpenSpielObservation) -> str:
        """Return for example "card Q moves PASS BET"."""
        card, moves = self._read_card_and_moves(observation)
        return " ".join([f"card {card}", *(["moves", *moves] if moves else [])])

    def describe(self, observation: OpenSpielObservation) -> str:
        """Return the player's card and seat, and the moves so far."""
        card, moves = self._read_card_and_moves(observation)
        history = f"Moves so far: {', '.join(moves)}." if moves else "No moves so far."
        if observation.game_phase == "terminal":
            return f"The game is over. Your card: {card}. {history}"
        seat = f"You are player {self.player + 1} of {self.loaded_game.num_players}."
        return f"{seat} Your card: {card}. {history} PASS or BET?"

    def _read_card_and_moves(self, observation: OpenSpielObservation) -> tuple[str, list[str]]:
        # The information-state tensor has one element per seat, one per card and two per move.
        num_players = self.loaded_game.num_players
        info_state = observation.info_state
        card = info_state.index(1.0, num_players) - num_players
        move_elements = info_state[num_players + len(self._cards) :]
        move_indices = [
            int(bet)
            for no_bet, bet in zip(move_elements[::2], move_elements[1::2], strict=True)
            if no_bet or bet
        ]
        return self._cards[card], [_MOVE_NAMES[move] for move in move_indices]


def _number_cards(num_cards: int) -> tuple[str, ...]:
    return tuple(str(card + 1) for card in range(num_cards))
