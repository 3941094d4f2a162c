"""Text of blackjack: the prompt is "hard 16 vs 10", the response HIT or STAND."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from ..models import OpenSpielObservation
from .renderer import GameRenderer
from .words import NUMBER_WORDS

CARD_NAMES = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")

# Layout of OpenSpiel's observation tensor: 3 elements for the phase, 30 for the player's total
# in unary (from 0), then 52 cards three times: open card, player's hand, dealer's known hand.
_TOTAL_START = 3
_OPEN_CARD_START = 33
_HAND_START = 85
_DEALER_HAND_START = 137
_NUM_CARDS = 52
_NUM_RANKS = 13
_PLAYER_ACES = tuple(_HAND_START + suit * _NUM_RANKS for suit in range(4))
_CARD_VALUES = tuple(min(card % _NUM_RANKS + 1, 10) for card in range(_NUM_CARDS))
_UP_CARD_NAMES = tuple("A" if value == 1 else str(value) for value in _CARD_VALUES)


def read_hand_and_up_card(info_state: Sequence[float]) -> tuple[int, bool, str]:
    """Return the player's total, whether it is soft, and the dealer's card, "A" or "2" to "10"."""
    total = info_state.index(0.0, _TOTAL_START) - _TOTAL_START - 1
    up_card = _UP_CARD_NAMES[info_state.index(1.0, _OPEN_CARD_START) - _OPEN_CARD_START]
    has_ace = 1.0 in [info_state[index] for index in _PLAYER_ACES]
    # An ace counts 11 if the total is above the sum of the values with ace = 1.
    is_soft = has_ace and total != sum(
        _CARD_VALUES[card] for card in _read_cards(info_state, _HAND_START)
    )
    return total, is_soft, up_card


def format_situation(total: int, is_soft: bool, up_card: str) -> str:
    """Return the compact text of a decision, for example "soft 18 vs A"."""
    return f"{'soft' if is_soft else 'hard'} {total} vs {up_card}"


class BlackjackRenderer(GameRenderer):
    """Renderer that shows the total, whether it is soft, and the dealer's open card."""

    action_names = ("HIT", "STAND")
    rules = (
        "You play blackjack against a dealer, with one deck of 52 cards.\n"
        "Cards 2 to 10 count their number; J, Q and K count 10. An ace (A) counts 11, or 1 "
        "where 11 would take the hand above 21. A hand in which an ace counts 11 is soft, any "
        "other is hard.\n"
        "HIT gives you one more card; above 21 you lose at once. STAND ends your turn: the "
        "dealer turns up the hidden card and draws until the dealer's hand counts 17 or more. "
        "Above 21 the dealer loses; else the higher hand wins, and equal hands are a draw."
    )

    def summarize(self, observation: OpenSpielObservation) -> str:
        """Return for example "hard 16 vs 10"; at the end "over 19 vs 22"."""
        info_state = observation.info_state
        if observation.game_phase == "terminal":
            return (
                f"over {_compute_total(info_state, _HAND_START)} "
                f"vs {_compute_total(info_state, _DEALER_HAND_START)}"
            )
        return format_situation(*read_hand_and_up_card(info_state))

    def describe(self, observation: OpenSpielObservation) -> str:
        """Return the player's cards and the dealer's open card; at the end, both hands."""
        info_state = observation.info_state
        hand = _read_card_names(info_state, _HAND_START)
        if observation.game_phase == "terminal":
            return (
                f"The game is over. Your hand: {hand} ({_compute_total(info_state, _HAND_START)}). "
                f"The dealer's hand: {_read_card_names(info_state, _DEALER_HAND_START)} "
                f"({_compute_total(info_state, _DEALER_HAND_START)})."
            )
        total, is_soft, up_card = read_hand_and_up_card(info_state)
        hand_kind = "soft" if is_soft else "hard"
        return f"Your hand: {hand} ({hand_kind} {total}). The dealer shows: {up_card}."

    def describe_briefly(self, observation: OpenSpielObservation, *, first: bool) -> str:
        """Return the dealer's open card, at first only, and the player's total, both in words.

        A model that learns to stand at 17 also stands at 7 if the totals are digits.
        """
        if observation.game_phase == "terminal":
            return self.describe(observation)
        total, is_soft, up_card = read_hand_and_up_card(observation.info_state)
        hand = f"You have a {'soft' if is_soft else 'hard'} {NUMBER_WORDS[total]}."
        card = "ace" if up_card == "A" else NUMBER_WORDS[int(up_card)]
        article = "an" if card in ("ace", "eight") else "a"
        return f"The dealer shows {article} {card}. {hand}" if first else hand


def _read_cards(info_state: Sequence[float], start: int) -> list[int]:
    return list(compress(range(_NUM_CARDS), info_state[start : start + _NUM_CARDS]))


def _read_card_names(info_state: Sequence[float], start: int) -> str:
    return ", ".join(CARD_NAMES[card % _NUM_RANKS] for card in _read_cards(info_state, start))


def _compute_total(info_state: Sequence[float], start: int) -> int:
    card_values = list(compress(_CARD_VALUES, info_state[start : start + _NUM_CARDS]))
    total = sum(card_values)
    return total + 10 if 1 in card_values and total <= 11 else total
