"""Games of a tiny model's warm start, played by the agent itself against random answers."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass

from ludus.proto.config import AgentConfig
from ludus.proto.errors import AgentError
from ludus.trainer.agents.endpoint import Endpoint
from ludus.trainer.agents.player import AdapterTools, run_in_time, started_endpoint, task_of
from ludus.trainer.agents.random_answers import RandomAnswers
from ludus.trainer.agents.runners import AgentRunner, make_runner
from ludus.trainer.learner.warm_start import Conversation
from ludus.trainer.rollout.environment_adapter import EnvironmentAdapter
from ludus.trainer.rollout.tool_adapter import ToolAdapter


@dataclass(frozen=True, slots=True)
class AgentGames:
    """The agent of one environment."""

    config: AgentConfig
    runner: AgentRunner
    endpoint: Endpoint
    slots: asyncio.Semaphore

    @classmethod
    async def start(cls, config: AgentConfig, stack: AsyncExitStack) -> AgentGames:
        """The agent, with an endpoint that listens; both end with the stack.

        Raises:
            ConfigError: there is no such agent, or its host cannot be listened on.
        """
        endpoint = await started_endpoint(config, stack)
        slots = asyncio.Semaphore(config.max_concurrent)
        return cls(config, await make_runner(config, stack), endpoint, slots)

    async def play(
        self, adapter: EnvironmentAdapter, seed: int, draw: random.Random, max_turns: int
    ) -> list[Conversation]:
        """What was said in a game; an agent that ends badly has nevertheless shown its prompts.

        Raises:
            AgentError: it never asked.
            ConfigError: nothing is known that may be said.
        """
        text = adapter.result.text
        policy = RandomAnswers(draw, text.legal_answers if text else (), max_turns)
        async with self.slots:
            task = await task_of(adapter, seed)
            tools = AdapterTools(adapter) if isinstance(adapter, ToolAdapter) else None
            with self.endpoint.episode(policy, tools) as episode:
                try:
                    await run_in_time(self.config, self.runner.run(task, episode.access))
                except AgentError:
                    episode.raise_failure()
                    if not policy.conversations:
                        raise
                episode.raise_failure()
        if not policy.conversations:
            raise AgentError("expected the agent to ask the policy at least once, it never did")
        return policy.conversations
