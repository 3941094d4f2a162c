"""Client of a coding_env server.

with CodingEnv(base_url="http://localhost:8008") as env:
    print(env.reset(seed=1).observation.prompt)
    result = env.step(CodeAction(code="def solve(n):\\n    return n\\n"))
    print(result.observation.stdout, result.observation.exit_code, result.reward)
"""

from __future__ import annotations

from ludus.env.client import TypedEnv, TypedResult

from .models import CodeAction, CodeObservation, CodeState

CodeResult = TypedResult[CodeObservation]
"""Result of one reset or step."""


class CodingEnv(TypedEnv[CodeAction, CodeObservation, CodeState]):
    """A session on a coding_env server."""

    default_url = "http://localhost:8008"
    observation_type = CodeObservation
    state_type = CodeState
