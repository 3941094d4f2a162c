"""Atari 2600 games: `make_environment` to play here, `AtariEnv` anywhere."""

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
    """A new environment; the options are those of `AtariEnvironment`.

    Raises:
        NotFoundError: there is no game of that name.
        ConfigError: ale-py is not installed, or the options do not fit.
    """
    # Clients need no emulator, so it is loaded only here.
    from .server.atari_environment import AtariEnvironment

    return AtariEnvironment(**options)
