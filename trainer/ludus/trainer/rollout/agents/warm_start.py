"""Episodes for a tiny model's warm start, played by the agent with random responses."""

from __future__ import annotations

import random

from ludus.proto.errors import AgentError
from ludus.trainer.learner.warm_start import Conversation
from ludus.trainer.rollout.adapters.environment_adapter import EnvironmentAdapter
from ludus.trainer.rollout.agents.host import AgentHost
from ludus.trainer.rollout.agents.random_responses import RandomResponder


async def play_with_random_responses(
    agent: AgentHost,
    adapter: EnvironmentAdapter,
    seed: int,
    draw: random.Random,
    max_turns: int,
) -> list[Conversation]:
    """Play an episode and return its conversations.

    An agent that fails has still shown its prompts, so its conversations count.

    Raises:
        AgentError: the agent sent no request.
        ConfigError: no legal answer and no tool is known.
    """
    text = adapter.result.text
    responder = RandomResponder(draw, text.legal_answers if text else (), max_turns)
    attempt = await agent.play(adapter, seed, responder)
    if not responder.conversations:
        if attempt.error is not None:
            raise attempt.error
        raise AgentError("the agent sent no request to the policy; it must send at least one")
    return responder.conversations
