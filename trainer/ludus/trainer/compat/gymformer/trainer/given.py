"""Networks that a program gives to `train_agent`, as what a run's configuration names.

given_networks(actor, critic) --> model.make = "...given:make_given" --> NetworkRun
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

_GIVEN: ContextVar[Networks | None] = ContextVar("given networks", default=None)


@contextmanager
def given_networks(actor: nn.Module, critic: nn.Module) -> Iterator[None]:
    """Let runs that open within the block train these."""
    token = _GIVEN.set((actor, critic))
    try:
        yield
    finally:
        _GIVEN.reset(token)


def make_given(observations: spaces.Space[Any], actions: spaces.Space[Any]) -> Networks:
    """The networks of the call of `train_agent` that goes on.

    Raises:
        ConfigError: none goes on: a file cannot bring the modules of a program back.
    """
    given = _GIVEN.get()
    if given is None:
        raise ConfigError(
            "this run trains networks that a program gave to train_agent; go on with its "
            "train_agent(..., resume=True), or play an agent that it saved by load_ppo_agent"
        )
    return given
