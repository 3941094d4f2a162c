"""The values that a reward may have, wherever it comes from."""

from __future__ import annotations

MAX_REWARD = 1e12
"""Maximum size of a reward, of a term of a reward, and of an episode's return.

Means and squares of such rewards are finite, also in 32 bits."""
REWARD_RULE = f"a finite number between {-MAX_REWARD:g} and {MAX_REWARD:g}"


def is_valid_reward(reward: float) -> bool:
    """Return whether a reward is finite and not too large to compute with."""
    return -MAX_REWARD <= reward <= MAX_REWARD
