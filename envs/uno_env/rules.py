"""A deal of Uno: whose turn it is, what may be played, and what cards do.

The rules of the box, with these decisions: the first open card is a number; nobody bluffs, so a
wild +4 may be played by who holds no card of the colour only; who can play may not draw, and who
draws may play the drawn card at once, and no other; nothing is stacked; with two players a reverse
is a skip. When the pile is used up, the cards under the open one are shuffled; where there are
none, nothing is drawn.
"""

from __future__ import annotations

import random

from .cards import (
    COLOURS,
    DECK,
    DRAW_TWO,
    NUMBERS,
    REVERSE,
    SKIP,
    WILD_DRAW_FOUR,
    WILDS,
    colour_of,
    face_of,
)

DRAW, PASS = "draw", "pass"
HAND_SIZE = 7


class Deal:
    """One deal, in which seat 0 begins.

    Args:
        rng: shuffles; the same gives the same cards whatever is played until the pile is used up.
    """

    def __init__(self, num_players: int, rng: random.Random) -> None:
        self._rng = rng
        self._pile = list(DECK)
        rng.shuffle(self._pile)
        self.hands = [[self._pile.pop() for _ in range(HAND_SIZE)] for _ in range(num_players)]
        # A deck without a number on it is no deck: the loop ends.
        first = next(card for card in reversed(self._pile) if face_of(card) in NUMBERS)
        self._pile.remove(first)
        self._played = [first]
        self.colour = colour_of(first)
        self.turn = 0
        self.direction = 1
        self.drawn: str | None = None
        """The card that the player whose turn it is has just drawn."""
        self.winner: int | None = None

    @property
    def top(self) -> str:
        """The open card."""
        return self._played[-1]

    def legal_moves(self) -> list[str]:
        """What the player whose turn it is may do, by name; a wild card with each colour."""
        if self.winner is not None:
            return []
        if self.drawn is not None:
            return [*self._plays_of([self.drawn]), PASS]
        return self._plays_of(self.hands[self.turn]) or [DRAW]

    def move(self, move: str) -> str:
        """Play one of the legal moves, and return what everybody sees of it."""
        if move == DRAW:
            return self._draw()
        if move == PASS:
            self._end_turn()
            return "passes"
        hand = self.hands[self.turn]
        card, called = _card_and_colour(move)
        hand.remove(card)
        self._played.append(card)
        self.colour = called
        self.drawn = None
        if not hand:
            self.winner = self.turn
        else:
            self._take_effect(face_of(card))
        return f"plays {move}"

    def seat_after(self, steps: int) -> int:
        """The seat so many places on from the one whose turn it is."""
        return (self.turn + steps * self.direction) % len(self.hands)

    def _plays_of(self, cards: list[str]) -> list[str]:
        plays: list[str] = []
        for card in dict.fromkeys(cards):
            if card in WILDS:
                if card != WILD_DRAW_FOUR or not self._holds_colour():
                    plays += [f"{card} {colour}" for colour in COLOURS]
            elif colour_of(card) == self.colour or face_of(card) == face_of(self.top):
                plays.append(card)
        return plays

    def _holds_colour(self) -> bool:
        return any(colour_of(card) == self.colour for card in self.hands[self.turn])

    def _draw(self) -> str:
        card = self._taken()
        if card is None:
            self._end_turn()
            return "finds no card to draw"
        self.hands[self.turn].append(card)
        self.drawn = card
        if not self._plays_of([card]):
            self._end_turn()
        return "draws"

    def _take_effect(self, face: str) -> None:
        if face == REVERSE and len(self.hands) > 2:
            self.direction = -self.direction
        skips = face in (SKIP, DRAW_TWO, WILD_DRAW_FOUR)
        skips = skips or (face == REVERSE and len(self.hands) == 2)
        for _ in range({DRAW_TWO: 2, WILD_DRAW_FOUR: 4}.get(face, 0)):
            card = self._taken()
            if card is not None:
                self.hands[self.seat_after(1)].append(card)
        self._end_turn(2 if skips else 1)

    def _end_turn(self, steps: int = 1) -> None:
        self.drawn = None
        self.turn = self.seat_after(steps)

    def _taken(self) -> str | None:
        """The next card of the pile; None where all cards are in hands."""
        if not self._pile:
            self._pile, self._played = self._played[:-1], self._played[-1:]
            self._rng.shuffle(self._pile)
        return self._pile.pop() if self._pile else None


def _card_and_colour(move: str) -> tuple[str, str]:
    """The card that a move plays, and the colour that holds from then on."""
    card, _, called = move.rpartition(" ")
    return (card, called) if card in WILDS else (move, colour_of(move))
