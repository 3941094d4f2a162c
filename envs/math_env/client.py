"""Client of a math_env server.

with MathEnv(base_url="http://localhost:8005") as env:
    result = env.reset(seed=7)
    result = env.step(MathAction(answer=19))
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import MathAction, MathObservation, MathState

MathResult = TypedResult[MathObservation]
"""Result of one reset or step."""


class MathEnv(TypedEnv[MathAction, MathObservation, MathState]):
    """A session on a math_env server. `reset` asks for the next question."""

    observation_type = MathObservation
    state_type = MathState
    default_url = "http://localhost:8005"
