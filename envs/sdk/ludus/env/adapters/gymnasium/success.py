"""The success of an episode of a Gymnasium environment, and the range of its return.

The first source that exists determines the success:

    info["is_success"]     value of the last step, a convention of robotics environments
    the name               goals of well-known environments
    spec.reward_threshold  return from which Gymnasium considers the task solved

Gymnasium defines the threshold for the mean of many episodes. Here, it applies to each episode.
Without any of these sources, the success is unknown.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np

from ludus.env.types import JsonObject, ReturnRange

_RETURN_TOLERANCE = 1e-9
"""Tolerance for rounding errors in the sum of an episode's rewards."""
_FROZEN_LAKE_NAMES = ("FrozenLake", "FrozenLake8x8")
_DEFAULT_SCHEDULE = (1, 0, 0)
"""FrozenLake's rewards on the goal, in a hole and on ice."""


def find_success(
    environment: gymnasium.Env[Any, Any],
    is_terminated: bool,
    last_reward: float,
    episode_return: float,
    info: JsonObject,
) -> bool | None:
    """Return whether an episode succeeded, or None if that is unknown.

    Args:
        is_terminated: whether the final step terminated the episode.
        last_reward: reward of the final step.
        info: info of the final step.
    """
    reported_success = info.get("is_success")
    if isinstance(reported_success, bool | int | float | np.bool_ | np.number):
        return bool(reported_success)
    spec = environment.spec
    if spec is None:
        return None
    match _find_name(environment):
        case "FrozenLake" | "FrozenLake8x8":
            frozen_lake: Any = environment.unwrapped
            return bool(frozen_lake.desc.flat[frozen_lake.s] == b"G")
        case (
            "Taxi"
            | "CliffWalking"
            | "CliffWalkingSlippery"
            | "MountainCar"
            | "MountainCarContinuous"
            | "Acrobot"
        ):
            return is_terminated  # these terminate only at the goal
        case "Blackjack":
            return last_reward > 0
    if spec.reward_threshold is None:
        return None
    return episode_return >= spec.reward_threshold - _RETURN_TOLERANCE


def is_game(environment: gymnasium.Env[Any, Any]) -> bool:
    """Return whether episodes are won; in all other environments of Gymnasium, they are solved."""
    return _find_name(environment) == "Blackjack"


def _find_name(environment: gymnasium.Env[Any, Any]) -> str:
    """Return the name of one of Gymnasium's own environments; "" for all others."""
    spec = environment.spec
    return spec.name if spec is not None and spec.namespace is None else ""


def find_return_range(environment: gymnasium.Env[Any, Any]) -> ReturnRange | None:
    """Return the range of an episode's return, or None if the environment declares none.

    Older environments declare the range of one step's reward, as `reward_range`. The default of
    that attribute is infinite.
    """
    num_steps = getattr(environment.spec, "max_episode_steps", None)
    try:
        lowest, highest = map(float, getattr(environment.unwrapped, "reward_range", ()))
    except (TypeError, ValueError):
        return None
    if num_steps is None or not -math.inf < lowest < highest < math.inf:
        return None
    if _pays_only_at_the_end(environment):
        return ReturnRange(lowest, highest)
    return ReturnRange(min(lowest, lowest * num_steps), max(highest, highest * num_steps))


def _pays_only_at_the_end(environment: gymnasium.Env[Any, Any]) -> bool:
    """Return True for a FrozenLake whose ice pays nothing: its goal and holes end the episode."""
    spec = environment.spec
    if spec is None or spec.namespace is not None or spec.name not in _FROZEN_LAKE_NAMES:
        return False
    *_, ice_reward = spec.kwargs.get("reward_schedule", _DEFAULT_SCHEDULE)
    return bool(ice_reward == 0)
