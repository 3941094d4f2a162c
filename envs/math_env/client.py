"""The client of a server of arithmetic.

with MathEnv(base_url="http://localhost:8005") as env:
    result = env.reset(seed=7)
    result = env.step(MathAction(answer=19))
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import MathAction, MathObservation, MathState

MathResult = TypedResult[MathObservation]
"""What one reset or step led to."""


class MathEnv(TypedEnv[MathAction, MathObservation, MathState]):
    """Exercises of a server; `reset` sets the next one."""

    observation_type = MathObservation
    state_type = MathState
    default_url = "http://localhost:8005"
