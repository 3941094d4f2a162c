"""Atari 2600 games.

`make_environment` builds an environment in this process; `AtariEnv` connects to a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .client import AtariEnv, AtariResult
from .models import AtariAction, AtariObservation, AtariState

if TYPE_CHECKING:
    from .server.atari_environment import AtariEnvironment

__all__ = [
    "DEFAULT_PORT",
    "AtariAction",
    "AtariEnv",
    "AtariObservation",
    "AtariResult",
    "AtariState",
    "make_environment",
]

DEFAULT_PORT = 8007


def make_environment(**options: Any) -> AtariEnvironment:
    """Return a new environment. The options are the fields of `AtariOptions`.

    Raises:
        NotFoundError: The game does not exist.
        ConfigError: ale-py is not installed, or an option is invalid.
    """
    # Clients do not need the emulator, so it is imported here only.
    from .server.atari_environment import AtariEnvironment

    return AtariEnvironment(**options)
