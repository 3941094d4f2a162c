"""Client of a reasoning_gym_env server.

with ReasoningGymEnv(base_url="http://localhost:8011") as env:
    result = env.reset(seed=7)
    result = env.step(ReasoningGymAction(answer="42"))
    print(result.reward, result.observation.correct_answer)
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import ReasoningGymAction, ReasoningGymObservation, ReasoningGymState

ReasoningGymResult = TypedResult[ReasoningGymObservation]
"""Result of one reset or step."""


class ReasoningGymEnv(TypedEnv[ReasoningGymAction, ReasoningGymObservation, ReasoningGymState]):
    """A session on a reasoning_gym_env server. `reset` asks for the next question."""

    default_url = "http://localhost:8011"
    observation_type = ReasoningGymObservation
    state_type = ReasoningGymState
