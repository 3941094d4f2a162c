"""Programming tasks: `make_environment` to play here, `CodingEnv` anywhere."""

from __future__ import annotations

from typing import Any

from .client import CodeResult, CodingEnv
from .models import CodeAction, CodeObservation, CodeState
from .server.coding_environment import CodingEnvironment

__all__ = [
    "DEFAULT_PORT",
    "CodeAction",
    "CodeObservation",
    "CodeResult",
    "CodeState",
    "CodingEnv",
    "CodingEnvironment",
    "make_environment",
]

DEFAULT_PORT = 8008


def make_environment(**options: Any) -> CodingEnvironment:
    """A new environment; the options are those of `CodingEnvironment`.

    Raises:
        ConfigError: the options do not fit.
    """
    return CodingEnvironment(**options)
