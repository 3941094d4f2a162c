"""The rules of Uno: turns, legal moves and the effects of cards.

These are the official rules, with the following decisions. The first open card is a number. A
wild +4 is legal only in a hand without the current color, so there is no bluffing. A player who
can play cannot draw; a drawn card may be played immediately, but no other card. Cards are not
stacked. With two players a reverse is a skip. When the pile is empty, the cards below the open
card are shuffled into a new pile; if there are none, no card is drawn.
"""

from __future__ import annotations

import random

from .cards import (
    COLORS,
    DECK,
    DRAW_TWO,
    NUMBERS,
    REVERSE,
    SKIP,
    WILD_DRAW_FOUR,
    WILDS,
    get_card_color,
    get_card_symbol,
)

DRAW, PASS = "draw", "pass"
HAND_SIZE = 7


class UnoGame:
    """One game of Uno. Seat 0 has the first turn.

    Args:
        rng: Generator that shuffles. The same generator state gives the same cards, whatever is
            played, until the pile is shuffled again.
    """

    def __init__(self, num_players: int, rng: random.Random) -> None:
        self._rng = rng
        self.pile = list(DECK)
        rng.shuffle(self.pile)
        self.hands = [[self.pile.pop() for _ in range(HAND_SIZE)] for _ in range(num_players)]
        first_card = next(card for card in reversed(self.pile) if get_card_symbol(card) in NUMBERS)
        self.pile.remove(first_card)
        self.played_cards = [first_card]
        """Played cards; the last one is open."""
        self.color = get_card_color(first_card)
        self.current_seat = 0
        """Seat of the player who must move."""
        self.direction = 1
        self.drawn_card: str | None = None
        """Card that the player drew in this turn."""
        self.winner: int | None = None

    @property
    def top(self) -> str:
        """The open card."""
        return self.played_cards[-1]

    def list_legal_moves(self) -> list[str]:
        """Return the legal moves by name, with one move per color for a wild card."""
        if self.winner is not None:
            return []
        if self.drawn_card is not None:
            return [*self._list_legal_plays([self.drawn_card]), PASS]
        return self._list_legal_plays(self.hands[self.current_seat]) or [DRAW]

    def make_move(self, move: str) -> str:
        """Make a legal move and return its public description."""
        if move == DRAW:
            return self._draw_card()
        if move == PASS:
            self._end_turn()
            return "passes"
        hand = self.hands[self.current_seat]
        card, color = _split_move(move)
        hand.remove(card)
        self.played_cards.append(card)
        self.color = color
        self.drawn_card = None
        if not hand:
            self.winner = self.current_seat
        else:
            self._apply_effect(get_card_symbol(card))
        return f"plays {move}"

    def find_seat_after(self, num_seats: int) -> int:
        """Return the seat that is `num_seats` after the current one in the direction of play."""
        return (self.current_seat + num_seats * self.direction) % len(self.hands)

    def _list_legal_plays(self, cards: list[str]) -> list[str]:
        legal_plays: list[str] = []
        for card in dict.fromkeys(cards):
            if card in WILDS:
                if card != WILD_DRAW_FOUR or not self._has_current_color():
                    legal_plays += [f"{card} {color}" for color in COLORS]
            elif get_card_color(card) == self.color or get_card_symbol(card) == get_card_symbol(
                self.top
            ):
                legal_plays.append(card)
        return legal_plays

    def _has_current_color(self) -> bool:
        return any(get_card_color(card) == self.color for card in self.hands[self.current_seat])

    def _draw_card(self) -> str:
        card = self._take_card()
        if card is None:
            self._end_turn()
            return "finds no card to draw"
        self.hands[self.current_seat].append(card)
        self.drawn_card = card
        if not self._list_legal_plays([card]):
            self._end_turn()
        return "draws"

    def _apply_effect(self, symbol: str) -> None:
        if symbol == REVERSE and len(self.hands) > 2:
            self.direction = -self.direction
        skips_player = symbol in (SKIP, DRAW_TWO, WILD_DRAW_FOUR)
        skips_player = skips_player or (symbol == REVERSE and len(self.hands) == 2)
        for _ in range({DRAW_TWO: 2, WILD_DRAW_FOUR: 4}.get(symbol, 0)):
            card = self._take_card()
            if card is not None:
                self.hands[self.find_seat_after(1)].append(card)
        self._end_turn(2 if skips_player else 1)

    def _end_turn(self, num_seats: int = 1) -> None:
        self.drawn_card = None
        self.current_seat = self.find_seat_after(num_seats)

    def _take_card(self) -> str | None:
        """Take the next card of the pile; return None if all cards are in hands."""
        if not self.pile:
            self.pile, self.played_cards = self.played_cards[:-1], self.played_cards[-1:]
            self._rng.shuffle(self.pile)
        return self.pile.pop() if self.pile else None


def _split_move(move: str) -> tuple[str, str]:
    """Return the card that a move plays and the color that must be followed after it."""
    card, _, color = move.rpartition(" ")
    return (card, color) if card in WILDS else (move, get_card_color(move))
