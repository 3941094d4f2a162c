"""Fixed policies to compare with; each looks at one observation only."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

from .market.simulation import MEAN
from .models import TradingObservation
from .portfolio import affordable, bought_equally
from .text import TradingRenderer


def fixed_policies(options: Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """The policies by name: "random", "cash", "buy_and_hold"; "revert" where prices do."""
    policies: dict[str, FixedPolicy] = {
        "random": trade_at_random,
        "cash": keep_cash,
        "buy_and_hold": buy_and_hold,
    }
    if options.get("market", "reverting") == "reverting" and not options.get("path"):
        policies["revert"] = revert
    return policies


def trade_at_random(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Holds, buys or sells as much as there is, all that can be done equally likely."""
    shown = TradingObservation.model_validate(observation)
    renderer = TradingRenderer("compact", has_quantities=False)
    return renderer.parse(rng.choice(renderer.legal_answers(shown)), shown).model_dump()


def keep_cash(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Holds the cash, for a return of 0."""
    return {"orders": {}}


def buy_and_hold(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Equal parts of all assets at the beginning, then nothing: what success is measured by."""
    if any(observation["shares"]):
        return {"orders": {}}
    prices, cost = observation["prices"][-1], observation["cost"]
    bought = bought_equally(observation["cash"], prices, cost).shares
    return {"orders": dict(zip(observation["assets"], bought, strict=True))}


def revert(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Knows the mean: sells what lies above it, and puts all cash on what lies farthest below."""
    prices, shares = observation["prices"][-1], observation["shares"]
    names, cost = observation["assets"], observation["cost"]
    cheapest = min(range(len(names)), key=prices.__getitem__)
    orders = {
        name: -number
        for name, number, price in zip(names, shares, prices, strict=True)
        if number and price > MEAN * (1 + cost)
    }
    number = affordable(observation["cash"], prices[cheapest], cost)
    if number and prices[cheapest] < MEAN * (1 - cost):
        orders[names[cheapest]] = number
    return {"orders": orders}
