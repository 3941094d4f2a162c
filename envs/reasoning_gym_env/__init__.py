"""Generated reasoning tasks of reasoning-gym.

`make_environment` builds an environment in this process; `ReasoningGymEnv` connects to a server.
"""

from __future__ import annotations

from typing import Any

from .client import ReasoningGymEnv, ReasoningGymResult
from .models import ReasoningGymAction, ReasoningGymObservation, ReasoningGymState
from .server.reasoning_gym_environment import ReasoningGymEnvironment

__all__ = [
    "DEFAULT_PORT",
    "ReasoningGymAction",
    "ReasoningGymEnv",
    "ReasoningGymEnvironment",
    "ReasoningGymObservation",
    "ReasoningGymResult",
    "ReasoningGymState",
    "make_environment",
]

DEFAULT_PORT = 8011


def make_environment(**options: Any) -> ReasoningGymEnvironment:
    """Return a new environment.

    The options are the fields of `ReasoningGymOptions` and of the generator's configuration.

    Raises:
        NotFoundError: The generator does not exist.
        ConfigError: reasoning-gym is not installed, or an option is invalid.
    """
    return ReasoningGymEnvironment(**options)
