"""Programming tasks.

`make_environment` builds an environment in this process; `CodingEnv` connects to a server.
"""

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
    """Return a new environment. The options are the fields of `CodingOptions`.

    Raises:
        ConfigError: An option is invalid.
    """
    return CodingEnvironment(**options)
