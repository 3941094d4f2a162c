"""Positions of objects in a game, read from the console's memory.

The memory addresses are from Anand et al., Unsupervised State Representation Learning in Atari
(2019), who list them for 22 games. Coordinates are in pixels, x to the right and y downward.
"""

from __future__ import annotations

import numpy as np

Facts = dict[str, int]

_ADDRESSES: dict[str, Facts] = {
    "pong": {
        **{"ball_x": 49, "ball_y": 54, "paddle_y": 51, "opponent_y": 50},
        **{"points": 14, "opponent_points": 13},
    },
    "breakout": {"ball_x": 99, "ball_y": 101, "paddle_x": 72, "bricks_hit": 77},
    "space_invaders": {"cannon_x": 28, "fleet_x": 26, "invaders": 17},
}
"""Memory address of each fact, by game."""

PONG_PADDLE_X = 188
BREAKOUT_PADDLE_Y = 189
_PONG_PADDLE_CENTER = 8
_BREAKOUT_PADDLE_CENTER = 8
"""Offset from a paddle's byte to its center, in the ball's coordinates."""


def read_facts(game: str, memory: np.ndarray, previous_facts: Facts) -> Facts:
    """Return the facts by name, or no facts for a game without known addresses.

    A game with a ball also has `has_ball`, and the ball's motion since the previous decision,
    `ball_speed_x` and `ball_speed_y`, which is 0 if there was no ball.

    Args:
        memory: uint8 [128].
        previous_facts: Facts at the previous decision; empty at the first decision.
    """
    facts = {name: int(memory[address]) for name, address in _ADDRESSES.get(game, {}).items()}
    if "ball_x" in facts:
        facts["has_ball"] = int(facts["ball_x"] > 0 and facts["ball_y"] > 0)
        has_motion = bool(facts["has_ball"] and previous_facts.get("has_ball"))
        for axis in ("x", "y"):
            name = f"ball_{axis}"
            facts[f"ball_speed_{axis}"] = facts[name] - previous_facts[name] if has_motion else 0
    return facts


def compute_pong_offset(facts: Facts) -> int:
    """Return the distance in pixels from the center of Pong's right paddle down to the ball."""
    return facts["ball_y"] - facts["paddle_y"] - _PONG_PADDLE_CENTER


def compute_breakout_offset(facts: Facts) -> int:
    """Return the distance in pixels from the center of Breakout's paddle right to the ball."""
    return facts["ball_x"] - facts["paddle_x"] - _BREAKOUT_PADDLE_CENTER
