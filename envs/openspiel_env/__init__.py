"""OpenSpiel games.

`make_environment` builds an environment in this process; `OpenSpielEnv` connects to a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .client import OpenSpielEnv, OpenSpielResult
from .models import OpenSpielAction, OpenSpielObservation, OpenSpielState

if TYPE_CHECKING:
    from .server.openspiel_environment import OpenSpielEnvironment

__all__ = [
    "DEFAULT_PORT",
    "OpenSpielAction",
    "OpenSpielEnv",
    "OpenSpielObservation",
    "OpenSpielResult",
    "OpenSpielState",
    "make_environment",
]

DEFAULT_PORT = 8004


def make_environment(**options: Any) -> OpenSpielEnvironment:
    """Return a new environment. The options are the fields of `OpenSpielOptions`.

    Raises:
        NotFoundError: The game does not exist.
        ConfigError: An option is invalid or does not fit the game.
    """
    # Clients do not need OpenSpiel, so it is imported here only.
    from .server.openspiel_environment import build_environment

    return build_environment(**options)
