"""Seeded arithmetic as an environment: `make_environment` to play here, `MathEnv` anywhere."""

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
    """A new environment; the options are those of `MathEnvironment`.

    Raises:
        ConfigError: the options do not fit.
    """
    return MathEnvironment(**options)
