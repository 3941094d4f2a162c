"""The 108 cards of Uno, by name: "red 5", "red skip", "red reverse", "red +2", "wild +4"."""

from __future__ import annotations

COLOURS = ("red", "yellow", "green", "blue")
NUMBERS = tuple(map(str, range(10)))
SKIP, REVERSE, DRAW_TWO = "skip", "reverse", "+2"
WILD, WILD_DRAW_FOUR = "wild", "wild +4"
WILDS = (WILD, WILD_DRAW_FOUR)

_TWICE = (*NUMBERS[1:], SKIP, REVERSE, DRAW_TWO)

DECK: tuple[str, ...] = (
    *(f"{colour} {NUMBERS[0]}" for colour in COLOURS),
    *(f"{colour} {face}" for colour in COLOURS for face in _TWICE for _ in range(2)),
    *(wild for wild in WILDS for _ in range(4)),
)
"""Of each colour one 0 and two of all else, and four wild cards of each kind."""

_ORDER = {card: place for place, card in enumerate(dict.fromkeys(DECK))}


def colour_of(card: str) -> str:
    """The colour; empty for a wild card."""
    return "" if card in WILDS else card.partition(" ")[0]


def face_of(card: str) -> str:
    """Number or sign; of a wild card its name."""
    return card if card in WILDS else card.partition(" ")[2]


def in_order(cards: list[str]) -> list[str]:
    """The cards by colour and number, so that a hand looks the same however it came about."""
    return sorted(cards, key=_ORDER.__getitem__)
