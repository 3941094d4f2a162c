"""The client of a server of prompts.

with PromptsEnv(base_url="http://localhost:8006") as env:
    result = env.reset(seed=7)
    result = env.step(PromptsAction(text="Paris"))
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import PromptsAction, PromptsObservation, PromptsState

PromptsResult = TypedResult[PromptsObservation]
"""What one reset or step led to."""


class PromptsEnv(TypedEnv[PromptsAction, PromptsObservation, PromptsState]):
    """Prompts of a server; `reset` shows the next one."""

    observation_type = PromptsObservation
    state_type = PromptsState
    default_url = "http://localhost:8006"
