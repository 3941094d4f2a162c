"""Simulated prices. Each kind of market is a random process of log prices x, one per asset.

walk       x' = x + mu - sigma^2 / 2 + sigma z              geometric Brownian motion
regimes    like walk; mu is +drift or -drift and changes sign with probability 0.1 per step
reverting  x' = (1 - pull) x + sigma z, started from its stationary distribution

z is standard normal, and a price is MEAN_PRICE exp(x). In `walk` and `regimes` the first price is
MEAN_PRICE.
"""

from __future__ import annotations

import math
import random
from typing import Literal

from .prices import Prices

MEAN_PRICE = 100.0
"""Price that `reverting` returns to and that the other markets start from."""

MarketKind = Literal["walk", "regimes", "reverting"]

_SWITCH_PROBABILITY = 0.1


def simulate(
    kind: MarketKind,
    rng: random.Random,
    num_rows: int,
    num_assets: int,
    *,
    volatility: float,
    drift: float,
    pull: float,
) -> Prices:
    """Return the prices of a market drawn from `rng`.

    Args:
        volatility: sigma per step.
        drift: mu per step.
        pull: Pull toward the mean, above 0 and at most 1.
    """
    columns = []
    for _ in range(num_assets):
        if kind == "reverting":
            log_prices = _simulate_reverting(rng, num_rows, volatility, pull)
        else:
            log_prices = _simulate_walk(
                rng, num_rows, volatility, drift, switches_drift=kind == "regimes"
            )
        columns.append([MEAN_PRICE * math.exp(log_price) for log_price in log_prices])
    assets = tuple(chr(ord("A") + index) for index in range(num_assets))
    dates = tuple(str(row + 1) for row in range(num_rows))
    return Prices(assets, dates, tuple(zip(*columns, strict=True)))


def _simulate_walk(
    rng: random.Random, num_rows: int, volatility: float, drift: float, *, switches_drift: bool
) -> list[float]:
    log_prices = [0.0]
    if switches_drift and rng.random() < 0.5:
        drift = -drift
    while len(log_prices) < num_rows:
        if switches_drift and rng.random() < _SWITCH_PROBABILITY:
            drift = -drift
        log_prices.append(log_prices[-1] + drift - volatility**2 / 2 + volatility * rng.gauss(0, 1))
    return log_prices


def _simulate_reverting(
    rng: random.Random, num_rows: int, volatility: float, pull: float
) -> list[float]:
    stationary_deviation = volatility / math.sqrt(1 - (1 - pull) ** 2)
    log_prices = [stationary_deviation * rng.gauss(0, 1)]
    while len(log_prices) < num_rows:
        log_prices.append((1 - pull) * log_prices[-1] + volatility * rng.gauss(0, 1))
    return log_prices
