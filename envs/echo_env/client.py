"""The client of a server of echoes.

with EchoEnv(base_url="http://localhost:8000") as env:
    env.reset()
    result = env.step(EchoAction(message="Hello, World!"))      # worth 1.3
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import EchoAction, EchoObservation, EchoState

EchoResult = TypedResult[EchoObservation]
"""What one reset or step led to."""


class EchoEnv(TypedEnv[EchoAction, EchoObservation, EchoState]):
    """Echoes of a server."""

    observation_type = EchoObservation
    state_type = EchoState
