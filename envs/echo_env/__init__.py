"""OpenEnv's echo: `make_environment` to play here, `EchoEnv` anywhere."""

from __future__ import annotations

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


def make_environment() -> EchoEnvironment:
    """A new environment; it has no options."""
    return EchoEnvironment()
