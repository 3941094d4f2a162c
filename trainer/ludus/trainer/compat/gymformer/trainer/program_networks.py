"""Networks that a program passes to `train_agent`, for a run whose configuration is plain data.

use_networks(actor, critic) --> model.make = "...:make_program_networks" --> NetworkRun
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from gymnasium import spaces
from torch import nn

from ludus.proto.errors import ConfigError

Networks = tuple[nn.Module, nn.Module]
"""Actor and critic."""

_NETWORKS: ContextVar[Networks | None] = ContextVar("networks of train_agent", default=None)


@contextmanager
def use_networks(actor: nn.Module, critic: nn.Module) -> Iterator[None]:
    """Make the runs that open in this block train these networks."""
    token = _NETWORKS.set((actor, critic))
    try:
        yield
    finally:
        _NETWORKS.reset(token)


def make_program_networks(observations: spaces.Space[Any], actions: spaces.Space[Any]) -> Networks:
    """Return the networks of the current call of `train_agent`.

    Raises:
        ConfigError: there is no such call, and a file cannot restore a program's modules.
    """
    networks = _NETWORKS.get()
    if networks is None:
        raise ConfigError(
            "this run trains networks that a program passed to train_agent; continue with that "
            "program and train_agent(..., resume=True), or load a saved agent with load_ppo_agent"
        )
    return networks
