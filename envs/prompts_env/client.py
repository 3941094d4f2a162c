"""Client of a prompts_env server.

with PromptsEnv(base_url="http://localhost:8006") as env:
    result = env.reset(seed=7)
    result = env.step(PromptsAction(text="Paris"))
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import PromptsAction, PromptsObservation, PromptsState

PromptsResult = TypedResult[PromptsObservation]
"""Result of one reset or step."""


class PromptsEnv(TypedEnv[PromptsAction, PromptsObservation, PromptsState]):
    """A session on a prompts_env server. `reset` shows the next prompt."""

    observation_type = PromptsObservation
    state_type = PromptsState
    default_url = "http://localhost:8006"
