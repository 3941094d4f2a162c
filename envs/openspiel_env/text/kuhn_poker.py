"""Text of Kuhn poker: the player's card and the moves so far. The response is PASS or BET."""

from __future__ import annotations

from ..games import LoadedGame
from ..models import OpenSpielObservation
from .renderer import GameRenderer, TextStyle

_MOVES = ("PASS", "BET")


class KuhnPokerRenderer(GameRenderer):
    """Renderer that shows the player's card and the moves, never another player's card."""

    words = _MOVES

    def __init__(self, loaded: LoadedGame, player: int, style: TextStyle) -> None:
        super().__init__(loaded, player, style)
        num_cards = loaded.num_players + 1
        self._cards = ("J", "Q", "K") if num_cards == 3 else _numbers(num_cards)
        self.rules = (
            f"You play Kuhn poker with {loaded.num_players} players and {num_cards} cards, from "
            f"low to high {', '.join(self._cards)}. Each player antes one chip and gets one card. "
            "In turn, players PASS or BET one chip. Once a player has bet, BET calls and PASS "
            "folds, and each other player has one more turn. The highest card among those who "
            "did not fold wins the pot."
        )

    def brief(self, observation: OpenSpielObservation) -> str:
        """Return for example "card Q moves PASS BET"."""
        card, moves = self._card_and_moves(observation)
        return " ".join([f"card {card}", *(["moves", *moves] if moves else [])])

    def describe(self, observation: OpenSpielObservation) -> str:
        """Return the player's card and seat, and the moves so far."""
        card, moves = self._card_and_moves(observation)
        history = f"Moves so far: {', '.join(moves)}." if moves else "No moves so far."
        if observation.game_phase == "terminal":
            return f"The game is over. Your card: {card}. {history}"
        seat = f"You are player {self.player + 1} of {self.loaded.num_players}."
        return f"{seat} Your card: {card}. {history} PASS or BET?"

    def _card_and_moves(self, observation: OpenSpielObservation) -> tuple[str, list[str]]:
        # The information-state tensor: one place per seat, one per card, two per move.
        num_players = self.loaded.num_players
        info_state = observation.info_state
        card = info_state.index(1.0, num_players) - num_players
        bets = info_state[num_players + len(self._cards) :]
        passed_or_bet = [
            int(bet) for no_bet, bet in zip(bets[::2], bets[1::2], strict=True) if no_bet or bet
        ]
        return self._cards[card], [_MOVES[move] for move in passed_or_bet]


def _numbers(num_cards: int) -> tuple[str, ...]:
    return tuple(str(card + 1) for card in range(num_cards))
