"""What is where on the screen of a game, read from the console's memory.

Where games keep things is known: Anand et al., Unsupervised State Representation Learning in
Atari (2019), list it for 22 games; here are three. Coordinates count pixels, x to the right and
y downwards.
"""

from __future__ import annotations

import numpy as np

Facts = dict[str, int]

_BYTES: dict[str, Facts] = {
    "pong": {
        **{"ball_x": 49, "ball_y": 54, "paddle_y": 51, "opponent_y": 50},
        **{"points": 14, "opponent_points": 13},
    },
    "breakout": {"ball_x": 99, "ball_y": 101, "paddle_x": 72, "bricks_hit": 77},
    "space_invaders": {"cannon_x": 28, "fleet_x": 26, "invaders": 17},
}
"""By game: where in the memory each fact is."""

PONG_PADDLE_X = 188
BREAKOUT_PADDLE_Y = 189
_PONG_MIDDLE = 8
_BREAKOUT_MIDDLE = 8
"""From the byte of a paddle to its middle, in the coordinates of the ball."""


def facts_of(game: str, memory: np.ndarray, before: Facts) -> Facts:
    """The facts by name; empty for a game whose memory is not known.

    A ball has two more, `has_ball`, and its change since the decision before as `ball_speed_x`
    and `ball_speed_y`, 0 where there was none.

    Args:
        memory: 128 bytes.
        before: the facts at the decision before; empty at the first.
    """
    facts = {name: int(memory[byte]) for name, byte in _BYTES.get(game, {}).items()}
    if "ball_x" in facts:
        facts["has_ball"] = int(facts["ball_x"] > 0 and facts["ball_y"] > 0)
        is_seen_twice = bool(facts["has_ball"] and before.get("has_ball"))
        for axis in ("x", "y"):
            now = facts[f"ball_{axis}"]
            facts[f"ball_speed_{axis}"] = now - before[f"ball_{axis}"] if is_seen_twice else 0
    return facts


def pong_aside(facts: Facts) -> int:
    """How many pixels the ball is below the middle of Pong's right paddle."""
    return facts["ball_y"] - facts["paddle_y"] - _PONG_MIDDLE


def breakout_aside(facts: Facts) -> int:
    """How many pixels the ball is to the right of the middle of Breakout's paddle."""
    return facts["ball_x"] - facts["paddle_x"] - _BREAKOUT_MIDDLE
