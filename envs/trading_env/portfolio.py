"""A portfolio of cash and whole shares, without credit.

With cost rate c, buying n shares at price p costs n p (1 + c), and selling them earns n p (1 - c).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ROUNDING_SHARE = 1e-9
"""Share of the cash by which a purchase may exceed the cash, because of rounding."""


@dataclass(frozen=True, slots=True)
class Portfolio:
    """Cash and the number of shares of each asset."""

    cash: float
    shares: tuple[int, ...]

    def compute_value(self, prices: Sequence[float]) -> float:
        """Return the value at these prices."""
        return self.cash + sum(
            num_shares * price for num_shares, price in zip(self.shares, prices, strict=True)
        )

    def fill(self, orders: Mapping[int, int], prices: Sequence[float], cost: float) -> Portfolio:
        """Return the portfolio after the orders, given by asset index. Sales come first.

        Raises:
            ValueError: The orders need more shares or cash than the portfolio has.
        """
        cash, shares = self.cash, list(self.shares)
        for index, num_shares in sorted(orders.items(), key=lambda order: order[1]):
            price_factor = 1 + cost if num_shares > 0 else 1 - cost
            cash -= num_shares * prices[index] * price_factor
            shares[index] += num_shares
            if shares[index] < 0:
                raise ValueError(
                    f"cannot sell {-num_shares} shares, only {self.shares[index]} owned"
                )
        if cash < -_ROUNDING_SHARE * self.cash:
            raise ValueError(
                f"not enough cash: {self.cash - cash:.2f} needed, {self.cash:.2f} available"
            )
        return Portfolio(max(0.0, cash), tuple(shares))


def count_affordable_shares(cash: float, price: float, cost: float) -> int:
    """Return the number of shares that the cash buys."""
    return math.floor(cash * (1 + _ROUNDING_SHARE / 2) / (price * (1 + cost)))


def buy_equally(cash: float, prices: Sequence[float], cost: float) -> Portfolio:
    """Return the portfolio after an equal part of the cash is spent on each asset."""
    cash_per_asset = cash / len(prices)
    orders = {
        index: count_affordable_shares(cash_per_asset, price, cost)
        for index, price in enumerate(prices)
    }
    return Portfolio(cash, (0,) * len(prices)).fill(orders, prices, cost)
