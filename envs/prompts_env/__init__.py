"""Rows of a data set as tasks: `make_environment` to play here, `PromptsEnv` anywhere."""

from __future__ import annotations

from typing import Any

from .client import PromptsEnv, PromptsResult
from .data.writing import write_rows
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
    """A new environment; the options are those of `PromptsEnvironment`.

    Raises:
        ConfigError: the options or the data do not fit.
    """
    return PromptsEnvironment(**options)
