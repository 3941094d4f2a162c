"""Messages between a trading_env server and its players."""

from __future__ import annotations

from pydantic import Field

from ludus.env import Action, Observation, State


class TradingAction(Action):
    """Orders at the last prices shown. Sales are filled before purchases."""

    orders: dict[str, int] = Field(default_factory=dict)
    """Number of shares to buy, by asset. A negative number sells; no orders means hold."""


class TradingObservation(Observation):
    """The recent prices and the player's portfolio."""

    assets: list[str]
    prices: list[list[float]]
    """[rows, assets], oldest first. Orders are filled at the prices of the last row."""
    date: str
    """Date of the last row, or its number if the market has no dates."""
    cash: float
    shares: list[int]
    """Number of shares of each asset."""
    value: float
    """Cash plus the value of the shares at the last prices."""
    cost: float
    """Transaction cost, as a fraction of the value of an order."""
    steps_left: int
    """Number of decisions until the end of the episode."""


class TradingState(State):
    """State of the episode, hidden from players."""

    market: str = ""
    value: float = 0.0
    hold_value: float = 0.0
    """Final value of a portfolio that spends equal cash on all assets at the start."""
