"""Plays episodes with an agent, from the opening to what the environment makes of its answer.

    opening --task--> agent --asks--> endpoint --> ConversationTree        (as often as it likes)
                        |
                        +--returns--> answer or action --> environment --> reward, status

An agent that fails, does not end in time or returns what cannot be read leaves a void episode:
nothing is learned from it. Where a limit of the run refused it an answer, that is the policy's
doing, or the run's, and the episode is truncated however its agent ends.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from ludus.env.types import Tool
from ludus.proto.config import AgentConfig, RolloutConfig
from ludus.proto.errors import AgentError
from ludus.trainer.agents.endpoint import Endpoint
from ludus.trainer.agents.runners import AgentRunner, make_runner
from ludus.trainer.agents.task import AgentTask, Returned, read_returned
from ludus.trainer.agents.tree import ConversationTree
from ludus.trainer.core.interfaces import GenerateFn
from ludus.trainer.core.types import RolloutStatus, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.environment_adapter import EnvironmentAdapter, Reply
from ludus.trainer.rollout.episode import Ended, LastResult
from ludus.trainer.rollout.tool_adapter import ToolAdapter
from ludus.trainer.rollout.tool_calls import ToolCall

_EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class AgentPlayer:
    """The agent of one environment of a run."""

    config: AgentConfig
    runner: AgentRunner
    endpoint: Endpoint
    generate: GenerateFn
    chat: ChatTokenizer
    limits: RolloutConfig
    """Those of the environment."""
    slots: asyncio.Semaphore
    """For agents that run at once."""

    @classmethod
    async def start(
        cls,
        config: AgentConfig,
        generate: GenerateFn,
        chat: ChatTokenizer,
        limits: RolloutConfig,
        stack: AsyncExitStack,
    ) -> AgentPlayer:
        """The agent, with an endpoint that listens; both end with the stack.

        Raises:
            ConfigError: there is no such agent, or its host cannot be listened on.
        """
        endpoint = await started_endpoint(config, stack)
        runner = await make_runner(config, stack)
        slots = asyncio.Semaphore(config.max_concurrent)
        return cls(config, runner, endpoint, generate, chat, limits, slots)

    def begin(
        self, adapter: EnvironmentAdapter, seed: int, sampling: Sampling, key: int
    ) -> tuple[ConversationTree, Awaitable[Ended]]:
        """What will be kept of the episode, and how it will have ended."""
        tree = ConversationTree(self.generate, self.chat, self.limits, sampling, key)
        return tree, self._play(adapter, seed, tree)

    async def _play(self, adapter: EnvironmentAdapter, seed: int, tree: ConversationTree) -> Ended:
        task = await task_of(adapter, seed)
        tools = AdapterTools(adapter, tree) if isinstance(adapter, ToolAdapter) else None
        async with self.slots:
            returned = await self._run(task, tree, tools)
        if not tree.num_turns:
            tree.refuse_if_full()
            raise AgentError("expected the agent to ask the policy at least once, it never did")
        reply = await _told(adapter, returned, tools)
        tree.acted(reply.action)
        tree.add_reward(reply.reward + returned.reward)
        refused = RolloutStatus.TRUNCATED if tree.refusal else RolloutStatus.TERMINATED
        last = LastResult(adapter.result)
        fields = {**returned.fields, **last} if returned.fields else last
        return Ended(reply.status or refused, fields, success=adapter.result.success)

    async def _run(
        self, task: AgentTask, tree: ConversationTree, tools: AdapterTools | None
    ) -> Returned:
        """What the agent returned; nothing where it ended badly after a limit had refused it."""
        with self.endpoint.episode(tree, tools) as episode:
            try:
                value = await run_in_time(self.config, self.runner.run(task, episode.access))
                returned = read_returned(value, self.config.answer, tree.last_text)
            except AgentError:
                episode.raise_failure()
                if tree.refusal and tree.num_turns:
                    return Returned()
                raise
            episode.raise_failure()
            return returned


class AdapterTools:
    """The environment's tools, as an agent calls them over MCP."""

    def __init__(self, adapter: ToolAdapter, tree: ConversationTree | None = None) -> None:
        self._adapter = adapter
        self._tree = tree
        self.status: RolloutStatus | None = None
        """How a call has ended the episode; None while it continues."""
        self.reward = 0.0
        """What calls have earned."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """All of them."""
        return self._adapter.tools

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """What the tool returned, and whether it failed."""
        if self.status is not None:
            return "the episode is over", True
        result = await self._adapter.call(call)
        self.status = result.status
        self.reward += result.reward
        if self._tree is not None:
            self._tree.called(1, int(result.failed))
        return result.message["content"], result.failed


async def started_endpoint(config: AgentConfig, stack: AsyncExitStack) -> Endpoint:
    """An endpoint that listens where the configuration says, until the stack ends."""
    advertised = _own_address() if config.host in _EVERYWHERE else None
    endpoint = Endpoint(config.host, advertised=advertised)
    await endpoint.start()
    stack.push_async_callback(endpoint.stop)
    return endpoint


async def task_of(adapter: EnvironmentAdapter, seed: int) -> AgentTask:
    """What the agent is given of an episode that has begun."""
    messages = (await adapter.opening()).messages if adapter.has_words else []
    first = adapter.result
    return AgentTask(
        text="\n\n".join(one["content"] for one in messages),
        messages=messages,
        observation=dict(first.observation),
        info=dict(first.info),
        seed=seed,
    )


async def run_in_time(config: AgentConfig, running: Awaitable[Any]) -> Any:
    """What the agent returned.

    Raises:
        AgentError: it failed, or did not end in time.
    """
    try:
        async with asyncio.timeout(config.timeout_s) as limit:
            return await running
    except TimeoutError:
        if not limit.expired():
            raise
        raise AgentError(
            f"expected the agent to end within agent.timeout_s = {config.timeout_s:g} s, it did "
            "not and was ended; raise the limit, or see what it waits for"
        ) from None


async def _told(
    adapter: EnvironmentAdapter, returned: Returned, tools: AdapterTools | None
) -> Reply:
    """What comes of what the agent returned, and what its calls of tools have earned before."""
    if tools is not None and tools.status is not None:
        return Reply([], tools.reward, tools.status)
    reply = Reply([])
    if returned.answer is not None:
        reply = await adapter.act(returned.answer)
    elif returned.action is not None:
        reply = await adapter.step({"action": returned.action})
    return reply if tools is None else replace(reply, reward=reply.reward + tools.reward)


def _own_address() -> str:
    """The address under which other machines reach this one: that of its way out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the address is one for examples
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        return str(probe.getsockname()[0])
