"""Uno: `make_environment` to play here, `UnoEnv` anywhere."""

from __future__ import annotations

from typing import Any

from .client import UnoEnv, UnoResult
from .models import UnoAction, UnoObservation, UnoState
from .server.uno_environment import UnoEnvironment

__all__ = [
    "DEFAULT_PORT",
    "UnoAction",
    "UnoEnv",
    "UnoEnvironment",
    "UnoObservation",
    "UnoResult",
    "UnoState",
    "make_environment",
]

DEFAULT_PORT = 8010


def make_environment(**options: Any) -> UnoEnvironment:
    """A new environment; the options are those of `UnoEnvironment`.

    Raises:
        ConfigError: the options do not fit.
    """
    return UnoEnvironment(**options)
