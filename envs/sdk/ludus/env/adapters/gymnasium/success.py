"""The success of an episode of a Gymnasium environment, from the first available source.

    info["is_success"]     value of the last step, a convention of robotics environments
    GOALS                  goals of well-known environments
    spec.reward_threshold  return from which Gymnasium considers the task solved

Gymnasium defines the threshold for the mean of many episodes. Here, it applies to each episode.
Without any of these sources, the success is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from ludus.env.types import JsonObject

_TOLERANCE = 1e-9
"""Tolerance for rounding errors in the sum of an episode's rewards."""


@dataclass(frozen=True, slots=True)
class FinalStep:
    """The final step of an episode."""

    environment: gymnasium.Env[Any, Any]
    terminated: bool
    reward: float
    """Reward of the final step."""
    episode_return: float
    info: JsonObject


def _is_terminated(step: FinalStep) -> bool:
    """Return the success in environments that terminate only at the goal."""
    return step.terminated


def _is_on_goal(step: FinalStep) -> bool:
    lake: Any = step.environment.unwrapped
    return bool(lake.desc.flat[lake.s] == b"G")


def _is_won(step: FinalStep) -> bool:
    return step.reward > 0


GOALS: dict[str, Callable[[FinalStep], bool]] = {
    "FrozenLake": _is_on_goal,
    "FrozenLake8x8": _is_on_goal,
    "Taxi": _is_terminated,
    "CliffWalking": _is_terminated,
    "MountainCar": _is_terminated,
    "MountainCarContinuous": _is_terminated,
    "Acrobot": _is_terminated,
    "Blackjack": _is_won,
}
"""Success criteria by the environment's name without version."""


def find_success(step: FinalStep) -> bool | None:
    """Return whether the episode succeeded, or None if that is unknown."""
    success = step.info.get("is_success")
    if isinstance(success, bool | int | float | np.bool_ | np.number):
        return bool(success)
    spec = step.environment.spec
    if spec is None:
        return None
    if spec.namespace is None and spec.name in GOALS:
        return GOALS[spec.name](step)
    if spec.reward_threshold is None:
        return None
    return step.episode_return >= spec.reward_threshold - _TOLERANCE
