"""Exact solution of blackjack, by enumeration of all deals from one deck of 52 cards.

The rules are those of OpenSpiel's "blackjack": hit or stand only; the dealer draws to 17 and stands
on soft 17; no bonus for a two-card 21; win +1, draw 0, loss -1.

A hand is a tuple with the number of cards of each value, from ace to ten; the ten includes jack,
queen and king. The dealer's hidden card is drawn like a later card, because unseen cards are
exchangeable.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Hand = tuple[int, ...]
Cell = tuple[int, bool, int]
"""Cell of a strategy chart: total, whether it is soft, and the open card (1 = ace)."""
HitProbability = Callable[[Hand, int], float]
"""Function from a hand and the dealer's open card to the probability of a hit."""

_DECK: Hand = (4, 4, 4, 4, 4, 4, 4, 4, 4, 16)
_CARD_VALUES = range(1, 11)
_EMPTY_HAND: Hand = (0,) * 10
_MAX_DRAWN_CARDS = 16  # with the open card these are at least 17, so the dealer stops
_ARRANGEMENTS = np.array(
    [
        [float(math.perm(cards, drawn)) for drawn in range(_MAX_DRAWN_CARDS + 1)]
        for cards in range(53)
    ]
)
"""[53, 17] number of orders in which j cards can be drawn from i cards."""


class OutcomeProbabilities(NamedTuple):
    """Probabilities that a game is won and drawn."""

    win: float
    draw: float

    @property
    def expected_return(self) -> float:
        """The probability of a win minus the probability of a loss."""
        return self.win - (1 - self.win - self.draw)


LOSS = OutcomeProbabilities(0.0, 0.0)


def compute_best_total(hand: Hand) -> tuple[int, bool]:
    """Return the total of a hand and whether an ace counts 11."""
    hard_total = sum(value * num_cards for value, num_cards in zip(_CARD_VALUES, hand, strict=True))
    is_soft = hand[0] > 0 and hard_total <= 11
    return hard_total + 10 * is_soft, is_soft


def find_chart_cell(hand: Hand, open_card: int) -> Cell:
    """Return the cell of a decision."""
    return (*compute_best_total(hand), open_card)


@functools.cache
def stand(hand: Hand, open_card: int) -> OutcomeProbabilities:
    """Return the outcome of standing."""
    total, _ = compute_best_total(hand)
    totals = _compute_dealer_totals(open_card, _count_unseen(hand, open_card))
    win = 1.0 - totals[total:22].sum()
    return OutcomeProbabilities(float(win), float(totals[total]))


def draw_card(hand: Hand, open_card: int) -> Iterator[tuple[float, Hand]]:
    """Yield the probability of each hand after one more card, including totals above 21."""
    yield from _iterate_draws(hand, _count_unseen(hand, open_card))


@functools.cache
def play_optimally(hand: Hand, open_card: int) -> OutcomeProbabilities:
    """Return the outcome of optimal play that considers all seen cards."""
    stand_outcome = stand(hand, open_card)
    hit_outcome = _average(
        (probability, play_optimally(new_hand, open_card))
        for probability, new_hand in _iterate_safe_draws(hand, open_card)
    )
    return max(stand_outcome, hit_outcome, key=lambda outcome: outcome.expected_return)


def evaluate(hit_probability: HitProbability) -> OutcomeProbabilities:
    """Return the average outcome of a policy over all deals."""

    @functools.cache
    def play(hand: Hand, open_card: int) -> OutcomeProbabilities:
        hit_share = hit_probability(hand, open_card)
        hit_outcome = LOSS
        if hit_share > 0:
            hit_outcome = _average(
                (probability, play(new_hand, open_card))
                for probability, new_hand in _iterate_safe_draws(hand, open_card)
            )
        return _average([(hit_share, hit_outcome), (1 - hit_share, stand(hand, open_card))])

    return average_over_deals(play)


def average_over_deals(play: Callable[[Hand, int], OutcomeProbabilities]) -> OutcomeProbabilities:
    """Return the mean outcome over the player's first two cards and the dealer's open card."""
    return _average(
        (probability, play(hand, open_card)) for probability, hand, open_card in _iterate_deals()
    )


def _iterate_deals() -> Iterator[tuple[float, Hand, int]]:
    for p_first, first_card in _iterate_draws(_EMPTY_HAND, _DECK):
        for p_second, hand in _iterate_draws(first_card, _remove(_DECK, first_card)):
            for p_open, dealer_hand in _iterate_draws(_EMPTY_HAND, _remove(_DECK, hand)):
                yield p_first * p_second * p_open, hand, dealer_hand.index(1) + 1


@dataclass(frozen=True, slots=True)
class StrategyChart:
    """The cells in which to hit. All other cells stand."""

    hits: frozenset[Cell]

    def hit_probability(self, hand: Hand, open_card: int) -> float:
        """Return 1 in cells that hit, otherwise 0."""
        return float(find_chart_cell(hand, open_card) in self.hits)


def find_basic_strategy() -> StrategyChart:
    """Return the best chart on (total, is soft, open card), by policy iteration.

    A cell covers many hands. Each is weighted by its probability under the chart. A small
    probability of random play makes all cells reachable.
    """
    chart = StrategyChart(frozenset())
    while True:
        improved_chart = _improve_chart(chart)
        if improved_chart == chart:
            return chart
        chart = improved_chart


def _improve_chart(chart: StrategyChart) -> StrategyChart:
    advantages: dict[Cell, float] = defaultdict(float)

    @functools.cache
    def play(hand: Hand, open_card: int) -> float:
        is_hit = find_chart_cell(hand, open_card) in chart.hits
        return hit(hand, open_card) if is_hit else stand(hand, open_card).expected_return

    @functools.cache
    def hit(hand: Hand, open_card: int) -> float:
        safe_probability, value = 0.0, 0.0
        for probability, new_hand in _iterate_safe_draws(hand, open_card):
            safe_probability += probability
            value += probability * play(new_hand, open_card)
        return value - (1 - safe_probability)

    for (hand, open_card), weight in _compute_decision_probabilities(chart).items():
        gain = hit(hand, open_card) - stand(hand, open_card).expected_return
        advantages[find_chart_cell(hand, open_card)] += weight * gain
    return StrategyChart(frozenset(cell for cell, gain in advantages.items() if gain > 0))


def _compute_decision_probabilities(
    chart: StrategyChart, exploration: float = 1e-6
) -> dict[tuple[Hand, int], float]:
    """Return the probability of each decision, with random hits of probability `exploration`."""
    probabilities: dict[tuple[Hand, int], float] = defaultdict(float)
    for probability, hand, open_card in _iterate_deals():
        probabilities[hand, open_card] += probability
    current_decisions = dict(probabilities)
    while current_decisions:
        next_decisions: dict[tuple[Hand, int], float] = defaultdict(float)
        for (hand, open_card), weight in current_decisions.items():
            p_hit = max(chart.hit_probability(hand, open_card), exploration)
            for probability, new_hand in _iterate_safe_draws(hand, open_card):
                next_decisions[new_hand, open_card] += weight * p_hit * probability
        for decision, weight in next_decisions.items():
            probabilities[decision] += weight
        current_decisions = next_decisions
    return probabilities


def _iterate_safe_draws(hand: Hand, open_card: int) -> Iterator[tuple[float, Hand]]:
    return (
        (probability, new_hand)
        for probability, new_hand in draw_card(hand, open_card)
        if compute_best_total(new_hand)[0] <= 21
    )


@dataclass(frozen=True, slots=True)
class _DealerHands:
    """All hands with which the dealer stops, without the open card."""

    num_drawn: NDArray[np.intp]
    """int [hands, 10] number of drawn cards of each value."""
    totals: NDArray[np.intp]
    """int [hands], including the open card."""
    num_orders: NDArray[np.float64]
    """float64 [hands] number of orders in which the dealer does not stop before the last card."""


@functools.cache
def _find_dealer_hands(open_card: int) -> _DealerHands:
    final_hands: dict[Hand, int] = defaultdict(int)
    open_hands = {_EMPTY_HAND: 1}
    while open_hands:
        next_hands: dict[Hand, int] = defaultdict(int)
        for new_hand, num_orders in open_hands.items():
            for value in _CARD_VALUES:
                next_hand = _add_card(new_hand, value)
                total, _ = compute_best_total(_add_card(next_hand, open_card))
                (final_hands if total >= 17 else next_hands)[next_hand] += num_orders
        open_hands = next_hands
    totals = [compute_best_total(_add_card(new_hand, open_card))[0] for new_hand in final_hands]
    return _DealerHands(
        np.array(list(final_hands)),
        np.array(totals),
        np.array(list(final_hands.values()), dtype=np.float64),
    )


def _compute_dealer_totals(open_card: int, deck: Hand) -> NDArray[np.float64]:
    """Return the probability of each total of the dealer, by total."""
    hands = _find_dealer_hands(open_card)
    num_ways = hands.num_orders * _ARRANGEMENTS[np.array(deck), hands.num_drawn].prod(axis=1)
    probability = num_ways / _ARRANGEMENTS[sum(deck), hands.num_drawn.sum(axis=1)]
    return np.bincount(hands.totals, weights=probability, minlength=22).astype(
        np.float64, copy=False
    )


def _iterate_draws(hand: Hand, deck: Hand) -> Iterator[tuple[float, Hand]]:
    num_deck_cards = sum(deck)
    for value, num_cards in zip(_CARD_VALUES, deck, strict=True):
        if num_cards:
            yield num_cards / num_deck_cards, _add_card(hand, value)


def _count_unseen(hand: Hand, open_card: int) -> Hand:
    return _remove(_DECK, _add_card(hand, open_card))


def _add_card(hand: Hand, value: int) -> Hand:
    return (*hand[: value - 1], hand[value - 1] + 1, *hand[value:])


def _remove(deck: Hand, hand: Hand) -> Hand:
    return tuple(num_cards - num_used for num_cards, num_used in zip(deck, hand, strict=True))


def _average(outcomes: Iterable[tuple[float, OutcomeProbabilities]]) -> OutcomeProbabilities:
    """Return the weighted sum. If the weights sum to less than 1, the rest counts as losses."""
    win, draw = 0.0, 0.0
    for weight, outcome in outcomes:
        win += weight * outcome.win
        draw += weight * outcome.draw
    return OutcomeProbabilities(win, draw)
