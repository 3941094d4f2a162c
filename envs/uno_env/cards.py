"""The 108 cards of Uno, by name: "red 5", "red skip", "red reverse", "red +2", "wild +4"."""

from __future__ import annotations

COLORS = ("red", "yellow", "green", "blue")
NUMBERS = tuple(map(str, range(10)))
SKIP, REVERSE, DRAW_TWO = "skip", "reverse", "+2"
WILD, WILD_DRAW_FOUR = "wild", "wild +4"
WILDS = (WILD, WILD_DRAW_FOUR)

_SYMBOLS_IN_PAIRS = (*NUMBERS[1:], SKIP, REVERSE, DRAW_TWO)

DECK: tuple[str, ...] = (
    *(f"{color} {NUMBERS[0]}" for color in COLORS),
    *(f"{color} {symbol}" for color in COLORS for symbol in _SYMBOLS_IN_PAIRS for _ in range(2)),
    *(wild for wild in WILDS for _ in range(4)),
)
"""One 0 and two of every other symbol in each color, and four of each wild card."""

_RANK_BY_CARD = {card: rank for rank, card in enumerate(dict.fromkeys(DECK))}


def get_card_color(card: str) -> str:
    """Return the color, or "" for a wild card."""
    return "" if card in WILDS else card.partition(" ")[0]


def get_card_symbol(card: str) -> str:
    """Return the number or the action, such as "skip"; for a wild card its name."""
    return card if card in WILDS else card.partition(" ")[2]


def sort_cards(cards: list[str]) -> list[str]:
    """Return the cards sorted by color and symbol."""
    return sorted(cards, key=_RANK_BY_CARD.__getitem__)
