"""Client of an echo_env server.

with EchoEnv(base_url="http://localhost:8000") as env:
    env.reset()
    result = env.step(EchoAction(message="Hello, World!"))      # reward 1.3
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import EchoAction, EchoObservation, EchoState

EchoResult = TypedResult[EchoObservation]
"""Result of one reset or step."""


class EchoEnv(TypedEnv[EchoAction, EchoObservation, EchoState]):
    """A session on an echo_env server."""

    observation_type = EchoObservation
    state_type = EchoState
