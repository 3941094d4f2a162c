"""What a player owns: cash and whole shares, never on credit.

An order of n shares at price p with cost rate c pays n p (1 + c), or earns n p (1 - c).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ROUNDING = 1e-9
"""Share of the cash by which a purchase may miss it for rounding."""


@dataclass(frozen=True, slots=True)
class Portfolio:
    """Cash and the shares of each asset."""

    cash: float
    shares: tuple[int, ...]

    def value(self, prices: Sequence[float]) -> float:
        """What it is worth at these prices."""
        return self.cash + sum(n * price for n, price in zip(self.shares, prices, strict=True))

    def traded(self, orders: Mapping[int, int], prices: Sequence[float], cost: float) -> Portfolio:
        """The portfolio after the orders, by the asset's index; sales come first.

        Raises:
            ValueError: it holds fewer shares than are sold, or less cash than is spent.
        """
        cash, shares = self.cash, list(self.shares)
        for index, number in sorted(orders.items(), key=lambda order: order[1]):
            fee = 1 + cost if number > 0 else 1 - cost
            cash -= number * prices[index] * fee
            shares[index] += number
            if shares[index] < 0:
                raise ValueError(f"{-number} shares are sold, {self.shares[index]} are held")
        if cash < -_ROUNDING * self.cash:
            raise ValueError(f"{self.cash - cash:.2f} is spent, {self.cash:.2f} is there")
        return Portfolio(max(0.0, cash), tuple(shares))


def affordable(cash: float, price: float, cost: float) -> int:
    """How many shares the cash buys."""
    return math.floor(cash * (1 + _ROUNDING / 2) / (price * (1 + cost)))


def bought_equally(cash: float, prices: Sequence[float], cost: float) -> Portfolio:
    """The portfolio of who spends an equal part of the cash on each asset."""
    part = cash / len(prices)
    orders = {index: affordable(part, price, cost) for index, price in enumerate(prices)}
    return Portfolio(cash, (0,) * len(prices)).traded(orders, prices, cost)
