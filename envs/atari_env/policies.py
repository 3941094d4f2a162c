"""Fixed policies to compare with; each looks at one observation only."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

from .facts import breakout_aside, pong_aside

_NEAR_PIXELS = 8
"""Closer than a paddle's half: moving on would overshoot."""


def fixed_policies(options: Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """The game's policies by name: "random" and "wait" for all, "follow" where there is a ball."""
    policies: dict[str, FixedPolicy] = {"random": act_at_random, "wait": wait}
    game = options.get("game", "pong")
    if game == "pong":
        policies["follow"] = follow_in_pong
    elif game == "breakout":
        policies["follow"] = follow_in_breakout
    return policies


def act_at_random(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Any action, all equally likely."""
    return {"action_id": rng.choice(observation["legal_actions"])}


def wait(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Touch nothing."""
    return _named("NOOP", observation)


def follow_in_pong(observation: JsonObject, rng: random.Random) -> JsonObject:
    """The paddle's middle to the height of the ball."""
    facts = observation["facts"]
    aside = pong_aside(facts) if facts["has_ball"] else 0
    if abs(aside) <= _NEAR_PIXELS:
        return _named("NOOP", observation)
    return _named("LEFT" if aside > 0 else "RIGHT", observation)


def follow_in_breakout(observation: JsonObject, rng: random.Random) -> JsonObject:
    """The paddle's middle under the ball; a new ball where there is none."""
    facts = observation["facts"]
    if not facts["has_ball"]:
        return _named("FIRE", observation)
    aside = breakout_aside(facts)
    if abs(aside) <= _NEAR_PIXELS:
        return _named("NOOP", observation)
    return _named("RIGHT" if aside > 0 else "LEFT", observation)


def _named(name: str, observation: JsonObject) -> JsonObject:
    return {"action_id": observation["action_names"].index(name)}
