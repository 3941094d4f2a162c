"""OpenSpiel games as an environment: `make_environment` to play here, `OpenSpielEnv` anywhere."""

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
    """A new environment; the options are those of `OpenSpielEnvironment`.

    Raises:
        NotFoundError: there is no game of that name.
        ConfigError: the options do not fit the game.
    """
    # Clients need no OpenSpiel, so it is loaded only here.
    from .server.openspiel_environment import build_environment

    return build_environment(**options)
