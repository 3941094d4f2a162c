"""Blackjack solved exactly, by enumeration over what can be dealt from one deck of 52 cards.

The rules are those of OpenSpiel's "blackjack": hit or stand only, the dealer draws to 17 and
stands on soft 17, no bonus for a two-card 21; win +1, draw 0, loss -1.

A hand is a tuple of ten counts, ace first and ten, jack, queen and king last together. The
dealer's hidden card is drawn like any later one: unseen cards are exchangeable.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Hand = tuple[int, ...]
Cell = tuple[int, bool, int]
"""What a strategy chart looks at: total, whether it is soft, and the open card (1 = ace)."""
HitProbability = Callable[[Hand, int], float]
"""From a hand and the dealer's open card to how likely the player hits."""

_DECK: Hand = (4, 4, 4, 4, 4, 4, 4, 4, 4, 16)
_COUNTS = range(1, 11)
_EMPTY: Hand = (0,) * 10
_MAX_DRAWN = 16  # with the open card that is 17 at least, so there the drawing ends
_ARRANGEMENTS = np.array(
    [[float(math.perm(cards, drawn)) for drawn in range(_MAX_DRAWN + 1)] for cards in range(53)]
)
"""In how many orders so many cards (second index) can be drawn from so many (first)."""


class Outcome(NamedTuple):
    """How likely a game is won and drawn."""

    win: float
    draw: float

    @property
    def expected_return(self) -> float:
        """Win minus loss."""
        return self.win - (1 - self.win - self.draw)


LOSS = Outcome(0.0, 0.0)


def best_total(hand: Hand) -> tuple[int, bool]:
    """The hand's total and whether an ace counts 11 in it."""
    hard_total = sum(count * number for count, number in zip(_COUNTS, hand, strict=True))
    is_soft = hand[0] > 0 and hard_total <= 11
    return hard_total + 10 * is_soft, is_soft


def cell_of(hand: Hand, open_card: int) -> Cell:
    """The chart's cell for a decision."""
    return (*best_total(hand), open_card)


@functools.cache
def stand(hand: Hand, open_card: int) -> Outcome:
    """What standing leads to."""
    total, _ = best_total(hand)
    dealer = _dealer_totals(open_card, _unseen(hand, open_card))
    win = 1.0 - dealer[total:22].sum()
    return Outcome(float(win), float(dealer[total]))


def draws(hand: Hand, open_card: int) -> Iterator[tuple[float, Hand]]:
    """The hands that one more card makes, and how likely each is; above 21 included."""
    yield from _draws(hand, _unseen(hand, open_card))


@functools.cache
def play_optimally(hand: Hand, open_card: int) -> Outcome:
    """The outcome of the play with the highest expected return, all seen cards considered."""
    standing = stand(hand, open_card)
    hitting = _mix((p, play_optimally(h, open_card)) for p, h in _safe_draws(hand, open_card))
    return max(standing, hitting, key=lambda outcome: outcome.expected_return)


def evaluate(hit_probability: HitProbability) -> Outcome:
    """The outcome of a policy over all deals."""

    @functools.cache
    def play(hand: Hand, open_card: int) -> Outcome:
        hit = hit_probability(hand, open_card)
        hitting = LOSS
        if hit > 0:
            hitting = _mix((p, play(h, open_card)) for p, h in _safe_draws(hand, open_card))
        return _mix([(hit, hitting), (1 - hit, stand(hand, open_card))])

    return over_deals(play)


def over_deals(play: Callable[[Hand, int], Outcome]) -> Outcome:
    """The mean outcome over the player's first two cards and the dealer's open card."""
    return _mix((p, play(hand, open_card)) for p, hand, open_card in _deals())


def _deals() -> Iterator[tuple[float, Hand, int]]:
    for p_first, one in _draws(_EMPTY, _DECK):
        for p_second, two in _draws(one, _without(_DECK, one)):
            for p_open, dealer in _draws(_EMPTY, _without(_DECK, two)):
                yield p_first * p_second * p_open, two, dealer.index(1) + 1


@dataclass(frozen=True, slots=True)
class Chart:
    """The cells in which to hit; all others stand."""

    hits: frozenset[Cell]

    def hit_probability(self, hand: Hand, open_card: int) -> float:
        """1 in the cells that hit, else 0."""
        return float(cell_of(hand, open_card) in self.hits)


def basic_strategy() -> Chart:
    """The best chart on (total, soft, open card), by policy iteration.

    One cell stands for many hands. Each is weighted by how often the chart's own play gets
    there, plus a hair of random play so that cells which it never reaches are judged too.
    """
    chart = Chart(frozenset())
    while True:
        improved = _improved(chart)
        if improved == chart:
            return chart
        chart = improved


def _improved(chart: Chart) -> Chart:
    advantage: dict[Cell, float] = defaultdict(float)

    @functools.cache
    def play(hand: Hand, open_card: int) -> float:
        hits = cell_of(hand, open_card) in chart.hits
        return hit(hand, open_card) if hits else stand(hand, open_card).expected_return

    @functools.cache
    def hit(hand: Hand, open_card: int) -> float:
        p_safe, value = 0.0, 0.0
        for p, drawn in _safe_draws(hand, open_card):
            p_safe += p
            value += p * play(drawn, open_card)
        return value - (1 - p_safe)

    for (hand, open_card), weight in _reach(chart).items():
        gain = hit(hand, open_card) - stand(hand, open_card).expected_return
        advantage[cell_of(hand, open_card)] += weight * gain
    return Chart(frozenset(cell for cell, gain in advantage.items() if gain > 0))


def _reach(chart: Chart, exploration: float = 1e-6) -> dict[tuple[Hand, int], float]:
    """How likely each decision comes up, when the chart is left with a small probability."""
    reach: dict[tuple[Hand, int], float] = defaultdict(float)
    for p, hand, open_card in _deals():
        reach[hand, open_card] += p
    wave = dict(reach)
    while wave:
        following: dict[tuple[Hand, int], float] = defaultdict(float)
        for (hand, open_card), weight in wave.items():
            p_hit = max(chart.hit_probability(hand, open_card), exploration)
            for p, drawn in _safe_draws(hand, open_card):
                following[drawn, open_card] += weight * p_hit * p
        for decision, weight in following.items():
            reach[decision] += weight
        wave = following
    return reach


def _safe_draws(hand: Hand, open_card: int) -> Iterator[tuple[float, Hand]]:
    return ((p, drawn) for p, drawn in draws(hand, open_card) if best_total(drawn)[0] <= 21)


@dataclass(frozen=True, slots=True)
class _DealerHands:
    """Every hand that ends the dealer's drawing, without its open card."""

    drawn: NDArray[np.intp]
    """(hands, ten counts)."""
    totals: NDArray[np.intp]
    orders: NDArray[np.float64]
    """In how many orders its cards can be drawn without an end before the last."""


@functools.cache
def _dealer_hands(open_card: int) -> _DealerHands:
    ended: dict[Hand, int] = defaultdict(int)
    wave = {_EMPTY: 1}
    while wave:
        following: dict[Hand, int] = defaultdict(int)
        for drawn, orders in wave.items():
            for count in _COUNTS:
                more = _plus(drawn, count)
                total, _ = best_total(_plus(more, open_card))
                (ended if total >= 17 else following)[more] += orders
        wave = following
    totals = [best_total(_plus(drawn, open_card))[0] for drawn in ended]
    return _DealerHands(
        np.array(list(ended)), np.array(totals), np.array(list(ended.values()), dtype=np.float64)
    )


def _dealer_totals(open_card: int, deck: Hand) -> NDArray[np.float64]:
    """How likely the dealer ends with each total, by total."""
    hands = _dealer_hands(open_card)
    ways = hands.orders * _ARRANGEMENTS[np.array(deck), hands.drawn].prod(axis=1)
    p = ways / _ARRANGEMENTS[sum(deck), hands.drawn.sum(axis=1)]
    return np.bincount(hands.totals, weights=p, minlength=22)


def _draws(hand: Hand, deck: Hand) -> Iterator[tuple[float, Hand]]:
    num_cards = sum(deck)
    for count, number in zip(_COUNTS, deck, strict=True):
        if number:
            yield number / num_cards, _plus(hand, count)


def _unseen(hand: Hand, open_card: int) -> Hand:
    return _without(_DECK, _plus(hand, open_card))


def _plus(hand: Hand, count: int) -> Hand:
    return (*hand[: count - 1], hand[count - 1] + 1, *hand[count:])


def _without(deck: Hand, hand: Hand) -> Hand:
    return tuple(n - used for n, used in zip(deck, hand, strict=True))


def _mix(outcomes: Iterator[tuple[float, Outcome]] | list[tuple[float, Outcome]]) -> Outcome:
    """The weighted sum; weight that is missing to 1 is a loss."""
    win, draw = 0.0, 0.0
    for weight, outcome in outcomes:
        win += weight * outcome.win
        draw += weight * outcome.draw
    return Outcome(win, draw)
