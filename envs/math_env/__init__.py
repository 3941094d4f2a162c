"""Seeded arithmetic.

`make_environment` builds an environment in this process; `MathEnv` connects to a server.
"""

from __future__ import annotations

from typing import Any

from .client import MathEnv, MathResult
from .models import MathAction, MathObservation, MathState
from .server.math_environment import MathEnvironment

__all__ = [
    "DEFAULT_PORT",
    "MathAction",
    "MathEnv",
    "MathEnvironment",
    "MathObservation",
    "MathResult",
    "MathState",
    "make_environment",
]

DEFAULT_PORT = 8005


def make_environment(**options: Any) -> MathEnvironment:
    """Return a new environment. The options are the fields of `MathOptions`.

    Raises:
        ConfigError: An option is invalid.
    """
    return MathEnvironment(**options)
