"""What travels between a server of markets and its players."""

from __future__ import annotations

from pydantic import Field

from ludus.env import Action, Observation, State


class TradingAction(Action):
    """Orders at the last prices shown, sales before purchases; none is to hold."""

    orders: dict[str, int] = Field(default_factory=dict)
    """By asset: shares to buy, or to sell where it is negative."""


class TradingObservation(Observation):
    """The market up to now, and what the player owns."""

    assets: list[str]
    prices: list[list[float]]
    """[rows, assets], oldest first: the last row holds the prices at which orders are filled."""
    date: str
    """Of the last row; its number where the market has no dates."""
    cash: float
    shares: list[int]
    """Of each asset."""
    value: float
    """Cash and shares at the last prices."""
    cost: float
    """Share of an order's worth that is paid for it."""
    steps_left: int
    """Decisions until the end of the episode."""


class TradingState(State):
    """Where the episode stands; players do not see it."""

    market: str = ""
    value: float = 0.0
    hold_value: float = 0.0
    """What would be owned by who had bought equal parts of all assets at the beginning."""
