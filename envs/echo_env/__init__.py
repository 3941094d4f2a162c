"""OpenEnv's echo environment.

`make_environment` builds an environment in this process; `EchoEnv` connects to a server.
"""

from __future__ import annotations

from typing import Any

from .client import EchoEnv, EchoResult
from .models import EchoAction, EchoObservation, EchoState
from .server.echo_environment import EchoEnvironment

__all__ = [
    "DEFAULT_PORT",
    "EchoAction",
    "EchoEnv",
    "EchoEnvironment",
    "EchoObservation",
    "EchoResult",
    "EchoState",
    "make_environment",
]

DEFAULT_PORT = 8000


def make_environment(**options: Any) -> EchoEnvironment:
    """Return a new environment. It has no options.

    Raises:
        ConfigError: An option was given.
    """
    return EchoEnvironment(**options)
