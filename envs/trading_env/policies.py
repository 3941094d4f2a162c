"""Baselines for trading. Each chooses from one observation only."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

from .market.simulation import MEAN_PRICE
from .models import TradingObservation
from .portfolio import buy_equally, count_affordable_shares
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
    typed_observation = TradingObservation.model_validate(observation)
    renderer = TradingRenderer("compact", has_quantities=False)
    return renderer.parse(
        rng.choice(renderer.legal_answers(typed_observation)), typed_observation
    ).model_dump()


def keep_cash(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Keep the cash, for a return of 0."""
    return {"orders": {}}


def buy_and_hold(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Buy equal parts of all assets at the start, then hold. A success must beat this policy."""
    if any(observation["shares"]):
        return {"orders": {}}
    prices, cost = observation["prices"][-1], observation["cost"]
    shares = buy_equally(observation["cash"], prices, cost).shares
    return {"orders": dict(zip(observation["assets"], shares, strict=True))}


def trade_on_mean_reversion(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Sell assets above the known mean price, and spend all cash on the asset furthest below it."""
    prices, shares = observation["prices"][-1], observation["shares"]
    names, cost = observation["assets"], observation["cost"]
    cheapest_index = min(range(len(names)), key=prices.__getitem__)
    orders = {
        name: -num_shares
        for name, num_shares, price in zip(names, shares, prices, strict=True)
        if num_shares and price > MEAN_PRICE * (1 + cost)
    }
    num_shares = count_affordable_shares(observation["cash"], prices[cheapest_index], cost)
    if num_shares and prices[cheapest_index] < MEAN_PRICE * (1 - cost):
        orders[names[cheapest_index]] = num_shares
    return {"orders": orders}
