"""Client of an atari_env server.

with AtariEnv(base_url="http://localhost:8007") as env:
    result = env.reset(seed=7)
    result = env.step(AtariAction(action_id=2))
    print(result.observation.facts, result.reward, result.done)
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import AtariAction, AtariObservation, AtariState

AtariResult = TypedResult[AtariObservation]
"""Result of one reset or step. `tensors["screen"]` is the picture, if pictures are sent."""


class AtariEnv(TypedEnv[AtariAction, AtariObservation, AtariState]):
    """A session on an atari_env server."""

    default_url = "http://localhost:8007"
    observation_type = AtariObservation
    state_type = AtariState
