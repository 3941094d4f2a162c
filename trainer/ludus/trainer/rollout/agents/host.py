"""An agent on a rollout worker, and the endpoint through which it samples from the policy.

opening --AgentTask--> agent --requests--> endpoint --> Responder     (any number of requests)
                         |
                         +--> AgentResult
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

from ludus.env.types import Tool
from ludus.proto.config import AgentConfig
from ludus.proto.errors import AgentError
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.rollout.adapters.environment_adapter import EnvironmentAdapter
from ludus.trainer.rollout.adapters.tool_adapter import ToolAdapter
from ludus.trainer.rollout.adapters.tool_calls import ToolCall
from ludus.trainer.rollout.agents.endpoint.exchange import Responder
from ludus.trainer.rollout.agents.endpoint.server import AgentEndpoint, EndpointAccess
from ludus.trainer.rollout.agents.launchers import AgentLauncher, start_launcher
from ludus.trainer.rollout.agents.task import AgentTask

RecordCalls: TypeAlias = Callable[[int, int], None]
"""Takes the number of tool calls and the number of failed ones."""

_ALL_INTERFACES = ("0.0.0.0", "::")


class AdapterTools:
    """The environment's tools, as an agent calls them over MCP."""

    def __init__(self, adapter: ToolAdapter, record_calls: RecordCalls | None) -> None:
        self._adapter = adapter
        self._record_calls = record_calls
        self.status: RolloutStatus | None = None
        """Status in which a call ended the episode; None while it continues."""
        self.reward = 0.0
        """Sum of the rewards of all calls."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """All tools."""
        return self._adapter.tools

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool and return its result, and True if the call failed."""
        if self.status is not None:
            return "the episode is over", True
        result = await self._adapter.call(call)
        self.status = result.status
        self.reward += result.reward
        if self._record_calls is not None:
            self._record_calls(1, int(result.failed))
        return result.message["content"], result.failed


@dataclass(frozen=True, slots=True)
class AgentAttempt:
    """The end of an agent's run on one episode."""

    value: Any
    """Value that the agent returned."""
    error: AgentError | None
    """Error of the agent; None if it returned a value."""
    tools: AdapterTools | None
    """Tools that the agent could call; None if it had none."""


@dataclass(frozen=True, slots=True)
class AgentHost:
    """The agent of one environment, ready to play episodes."""

    config: AgentConfig
    launcher: AgentLauncher
    endpoint: AgentEndpoint
    slots: asyncio.Semaphore
    """Limits the number of agents that run at the same time."""

    @classmethod
    async def start(cls, config: AgentConfig, stack: AsyncExitStack) -> AgentHost:
        """Return the agent with a running endpoint; the stack stops both.

        Raises:
            ConfigError: the agent does not exist, or its host has no such address.
        """
        advertised_host = _own_address() if config.host in _ALL_INTERFACES else None
        endpoint = AgentEndpoint(config.host, advertised_host=advertised_host)
        await endpoint.start()
        stack.push_async_callback(endpoint.stop)
        launcher = await start_launcher(config, stack)
        return cls(config, launcher, endpoint, asyncio.Semaphore(config.max_concurrent))

    async def play(
        self,
        adapter: EnvironmentAdapter,
        seed: int,
        responder: Responder,
        record_calls: RecordCalls | None = None,
    ) -> AgentAttempt:
        """Run the agent on an episode; an error of the agent is part of the attempt.

        Raises:
            Exception: the policy failed, or the agent's service cannot be reached.
        """
        messages = (await adapter.opening()).messages if adapter.has_text else []
        first_result = adapter.result
        task = AgentTask(
            text="\n\n".join(message["content"] for message in messages),
            messages=messages,
            observation=dict(first_result.observation),
            info=dict(first_result.info),
            seed=seed,
        )
        tools = None
        if isinstance(adapter, ToolAdapter):
            tools = AdapterTools(adapter, record_calls)
        async with self.slots:
            with self.endpoint.episode(responder, tools) as episode:
                value, error = None, None
                try:
                    value = await self._run_in_time(task, episode.access)
                except AgentError as agent_error:
                    error = agent_error
                episode.raise_failure()
        return AgentAttempt(value, error, tools)

    async def _run_in_time(self, task: AgentTask, access: EndpointAccess) -> Any:
        timeout_s = self.config.timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await self.launcher.run(task, access)
        except TimeoutError:
            if not limit.expired():
                raise
            raise AgentError(
                f"the agent did not finish within agent.timeout_s = {timeout_s:g} s and was "
                "stopped; raise the limit, or check what it waits for"
            ) from None


def _own_address() -> str:
    """Return the address under which other machines reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a reserved address; nothing is sent
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        return str(probe.getsockname()[0])
