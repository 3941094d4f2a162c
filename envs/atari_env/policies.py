"""Baselines for Atari games. Each chooses from one observation only."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ludus.env.evaluation import FixedPolicy
from ludus.env.types import JsonObject

from .facts import compute_breakout_offset, compute_pong_offset

_NEAR_PIXELS = 8
"""Distance, less than half a paddle, at which another move would overshoot."""


def fixed_policies(options: Mapping[str, Any]) -> dict[str, FixedPolicy]:
    """Return the game's baselines by name: "random", "wait", and "follow" in games with a ball."""
    policies: dict[str, FixedPolicy] = {"random": act_at_random, "wait": wait}
    game = options.get("game", "pong")
    if game == "pong":
        policies["follow"] = follow_in_pong
    elif game == "breakout":
        policies["follow"] = follow_in_breakout
    return policies


def act_at_random(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Return a random action; all are equally likely."""
    return {"action_id": rng.choice(observation["legal_actions"])}


def wait(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Do nothing."""
    return _find_action("NOOP", observation)


def follow_in_pong(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Move the center of the paddle to the height of the ball."""
    facts = observation["facts"]
    offset = compute_pong_offset(facts) if facts["has_ball"] else 0
    if abs(offset) <= _NEAR_PIXELS:
        return _find_action("NOOP", observation)
    return _find_action("LEFT" if offset > 0 else "RIGHT", observation)


def follow_in_breakout(observation: JsonObject, rng: random.Random) -> JsonObject:
    """Move the center of the paddle under the ball. Serve if there is no ball."""
    facts = observation["facts"]
    if not facts["has_ball"]:
        return _find_action("FIRE", observation)
    offset = compute_breakout_offset(facts)
    if abs(offset) <= _NEAR_PIXELS:
        return _find_action("NOOP", observation)
    return _find_action("RIGHT" if offset > 0 else "LEFT", observation)


def _find_action(name: str, observation: JsonObject) -> JsonObject:
    return {"action_id": observation["action_names"].index(name)}
