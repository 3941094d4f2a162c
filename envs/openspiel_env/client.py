"""The client of an OpenSpiel server, used as OpenEnv's tutorials use theirs.

env = OpenSpielEnv(base_url="http://localhost:8004")
result = env.reset()
result = env.step(OpenSpielAction(action_id=1))
env.close()
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import OpenSpielAction, OpenSpielObservation, OpenSpielState

OpenSpielResult = TypedResult[OpenSpielObservation]
"""What one reset or step led to."""


class OpenSpielEnv(TypedEnv[OpenSpielAction, OpenSpielObservation, OpenSpielState]):
    """One seat at a game on a server; `reset` deals the next episode."""

    observation_type = OpenSpielObservation
    state_type = OpenSpielState
    default_url = "http://localhost:8004"
