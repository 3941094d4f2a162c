"""Rows of a data set as tasks.

`make_environment` builds an environment in this process; `PromptsEnv` connects to a server.
"""

from __future__ import annotations

from typing import Any

from .client import PromptsEnv, PromptsResult
from .data.write import write_rows
from .models import PromptsAction, PromptsObservation, PromptsState
from .server.prompts_environment import PromptsEnvironment

__all__ = [
    "DEFAULT_PORT",
    "PromptsAction",
    "PromptsEnv",
    "PromptsEnvironment",
    "PromptsObservation",
    "PromptsResult",
    "PromptsState",
    "make_environment",
    "write_rows",
]

DEFAULT_PORT = 8006


def make_environment(**options: Any) -> PromptsEnvironment:
    """Return a new environment. The options are the fields of `PromptsOptions`.

    Raises:
        ConfigError: An option or the data set is invalid.
    """
    return PromptsEnvironment(**options)
