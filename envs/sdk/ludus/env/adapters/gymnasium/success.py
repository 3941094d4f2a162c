"""Whether an episode of a Gymnasium environment succeeded, as the first of these says that can.

    info["is_success"]     of the last step, the custom of robotics environments
    a goal known here      GOALS
    spec.reward_threshold  a return at which Gymnasium calls the task solved

The threshold is meant for the mean of many episodes; here each episode is held to it. Where none
of them says anything, nothing is known but the return.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from ludus.env.types import JsonObject

_TOLERANCE = 1e-9
"""What the rewards of an episode may lose in being added up."""


@dataclass(frozen=True, slots=True)
class Ending:
    """An episode's end."""

    environment: gymnasium.Env[Any, Any]
    terminated: bool
    reward: float
    """Of the last step."""
    episode_return: float
    info: JsonObject


def _is_over_at_the_goal(ending: Ending) -> bool:
    """For environments that only the goal terminates."""
    return ending.terminated


def _stands_on_the_goal(ending: Ending) -> bool:
    lake: Any = ending.environment.unwrapped
    return bool(lake.desc.flat[lake.s] == b"G")


def _is_won(ending: Ending) -> bool:
    return ending.reward > 0


GOALS: dict[str, Callable[[Ending], bool]] = {
    "FrozenLake": _stands_on_the_goal,
    "FrozenLake8x8": _stands_on_the_goal,
    "Taxi": _is_over_at_the_goal,
    "CliffWalking": _is_over_at_the_goal,
    "MountainCar": _is_over_at_the_goal,
    "MountainCarContinuous": _is_over_at_the_goal,
    "Acrobot": _is_over_at_the_goal,
    "Blackjack": _is_won,
}
"""By the environment's name without version."""


def success_of(ending: Ending) -> bool | None:
    """Whether the episode succeeded; None where nothing says so."""
    said = ending.info.get("is_success")
    if isinstance(said, bool | int | float | np.bool_ | np.number):
        return bool(said)
    spec = ending.environment.spec
    if spec is None:
        return None
    if spec.namespace is None and spec.name in GOALS:
        return GOALS[spec.name](ending)
    if spec.reward_threshold is None:
        return None
    return ending.episode_return >= spec.reward_threshold - _TOLERANCE
