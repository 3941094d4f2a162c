"""Baselines for trading. Each chooses from one observation only."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

from .market.simulation import MEAN
from .models import TradingObservation
from .portfolio import affordable_shares, buy_equally
from .text import TradingRenderer


def fixed_policies(options: Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """Return the baselines by name: "random", "cash", "buy_and_hold".

    A market with `reverting` prices also has "revert".
    """
    policies: dict[str, FixedPolicy] = {
        "random": trade_at_random,
        "cash": keep_cash,
        "buy_and_hold": buy_and_hold,
    }
    if options.get("market", "reverting") == "reverting" and not options.get("path"):
        policies["revert"] = trade_on_mean_reversion
    return policies


def trade_at_random(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Hold, or buy or sell the maximum of an asset; all legal choices are equally likely."""
    visible = TradingObservation.model_validate(observation)
    renderer = TradingRenderer("compact", has_quantities=False)
    return renderer.parse(rng.choice(renderer.legal_answers(visible)), visible).model_dump()


def keep_cash(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Keep the cash, for a return of 0."""
    return {"orders": {}}


def buy_and_hold(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Buy equal parts of all assets at the start, then hold. Success is measured against this."""
    if any(observation["shares"]):
        return {"orders": {}}
    prices, cost = observation["prices"][-1], observation["cost"]
    shares = buy_equally(observation["cash"], prices, cost).shares
    return {"orders": dict(zip(observation["assets"], shares, strict=True))}


def trade_on_mean_reversion(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Sell what is above the known mean; spend all cash on the asset furthest below it."""
    prices, shares = observation["prices"][-1], observation["shares"]
    names, cost = observation["assets"], observation["cost"]
    cheapest = min(range(len(names)), key=prices.__getitem__)
    orders = {
        name: -number
        for name, number, price in zip(names, shares, prices, strict=True)
        if number and price > MEAN * (1 + cost)
    }
    number = affordable_shares(observation["cash"], prices[cheapest], cost)
    if number and prices[cheapest] < MEAN * (1 - cost):
        orders[names[cheapest]] = number
    return {"orders": orders}
