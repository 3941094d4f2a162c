"""Client of a uno_env server.

with UnoEnv(base_url="http://localhost:8010") as env:
    result = env.reset(seed=1)
    result = env.step(UnoAction(move=result.observation.legal_actions[0]))
    print(result.observation.events, result.reward, result.done)
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import UnoAction, UnoObservation, UnoState

UnoResult = TypedResult[UnoObservation]
"""Result of one reset or step."""


class UnoEnv(TypedEnv[UnoAction, UnoObservation, UnoState]):
    """A session on a uno_env server."""

    default_url = "http://localhost:8010"
    observation_type = UnoObservation
    state_type = UnoState
