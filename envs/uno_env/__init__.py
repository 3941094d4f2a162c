"""The card game Uno.

`make_environment` builds an environment in this process; `UnoEnv` connects to a server.
"""

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
    """Return a new environment. The options are the fields of `UnoOptions`.

    Raises:
        ConfigError: An option is invalid.
    """
    return UnoEnvironment(**options)
