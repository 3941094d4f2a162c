"""Client of an openspiel_env server, used as in OpenEnv's tutorials.

env = OpenSpielEnv(base_url="http://localhost:8004")
result = env.reset()
result = env.step(OpenSpielAction(action_id=1))
env.close()
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import OpenSpielAction, OpenSpielObservation, OpenSpielState

OpenSpielResult = TypedResult[OpenSpielObservation]
"""Result of one reset or step."""


class OpenSpielEnv(TypedEnv[OpenSpielAction, OpenSpielObservation, OpenSpielState]):
    """A session on an openspiel_env server."""

    observation_type = OpenSpielObservation
    state_type = OpenSpielState
    default_url = "http://localhost:8004"
