"""The runner of episodes that an agent plays.

opening --AgentTask--> agent --requests--> endpoint --> Responder     (any number of requests)
                         |
                         +--> AgentResult --> answer or action --> environment --> reward, status

If the agent fails, exceeds its time limit or returns an invalid result, the episode is void. But if
a limit of the run refused one of the agent's requests, the episode is truncated, because then the
agent is not the cause.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from ludus.env import StepResult
from ludus.env.client import AsyncSession
from ludus.proto.config import AgentConfig
from ludus.proto.errors import AgentError
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.models.thoughts import THINK
from ludus.trainer.rollout.adapters.environment_adapter import EnvironmentAdapter, StepOutcome
from ludus.trainer.rollout.agents.conversation_tree import ConversationTree
from ludus.trainer.rollout.agents.endpoint.exchange import Responder
from ludus.trainer.rollout.agents.endpoint.server import (
    AgentEndpoint,
    EndpointAccess,
    EpisodeTools,
    make_tools,
)
from ludus.trainer.rollout.agents.launchers import (
    AgentLauncher,
    AgentResult,
    AgentTask,
    read_result,
    start_launcher,
)
from ludus.trainer.rollout.episode import EpisodeEnd, LastResultFields, SessionRunner
from ludus.trainer.rollout.runner import RunnerComponents

NO_REQUEST = "the agent sent no request to the policy; it must send at least one"
_ALL_INTERFACES = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class AgentHost:
    """The agent of one environment, with the endpoint through which it reaches the policy."""

    config: AgentConfig
    run_agent: AgentLauncher
    endpoint: AgentEndpoint
    slots: asyncio.Semaphore
    """Semaphore that limits the number of concurrent agents."""

    @classmethod
    async def start(cls, config: AgentConfig, stack: AsyncExitStack) -> AgentHost:
        """Return the agent with a running endpoint. `stack` stops both."""
        advertised_host = _find_own_address() if config.host in _ALL_INTERFACES else None
        endpoint = AgentEndpoint(config.host, advertised_host=advertised_host)
        await endpoint.start()
        stack.push_async_callback(endpoint.stop)
        run_agent = await start_launcher(config, stack)
        return cls(config, run_agent, endpoint, asyncio.Semaphore(config.max_concurrent))

    async def play(
        self,
        adapter: EnvironmentAdapter,
        seed: int,
        responder: Responder,
        tools: EpisodeTools | None,
    ) -> Any:
        """Run the agent on an episode and return its output.

        Raises:
            AgentError: the agent failed.
            Exception: the policy failed, or the agent's service cannot be reached.
        """
        messages = (await adapter.make_opening()).messages if adapter.has_text else []
        task = AgentTask(
            text="\n\n".join(message["content"] for message in messages),
            messages=messages,
            observation=dict(adapter.last_result.observation),
            info=dict(adapter.last_result.info),
            seed=seed,
        )
        async with self.slots:
            with self.endpoint.open_episode(responder, tools) as episode:
                try:
                    return await self._run_with_time_limit(task, episode.access)
                finally:
                    # A failure of the policy is the cause, even if the agent handles it.
                    episode.raise_if_failed()

    async def _run_with_time_limit(self, task: AgentTask, access: EndpointAccess) -> Any:
        timeout_s = self.config.timeout_s
        try:
            async with asyncio.timeout(timeout_s) as time_limit:
                return await self.run_agent(task, access)
        except TimeoutError:
            if not time_limit.expired():
                raise
            raise AgentError(
                f"the agent did not finish within agent.timeout_s = {timeout_s:g} s and was "
                "stopped; raise the limit, or check what it waits for"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRunner(SessionRunner[ConversationTree]):
    """A runner that plays each episode with the environment's agent."""

    record_class = ConversationTree
    agent: AgentHost

    @classmethod
    async def start_extra_fields(cls, components: RunnerComponents) -> dict[str, Any]:
        assert components.config.agent is not None
        return {"agent": await AgentHost.start(components.config.agent, components.stack)}

    async def play_to_end(
        self, session: AsyncSession, first_result: StepResult, seed: int, record: ConversationTree
    ) -> EpisodeEnd:
        adapter, tree = self.make_adapter(session, first_result), record
        tools = make_tools(adapter, tree.record_calls)
        try:
            agent_output = await self.agent.play(adapter, seed, tree, tools)
            result = read_result(agent_output, self.agent.config.answer, tree.last_text)
        except AgentError:
            if not tree.refusal or not tree.num_turns:
                raise
            result = AgentResult()
        if not tree.num_turns:
            tree.refuse_if_full()
            raise AgentError(NO_REQUEST)
        outcome = await _apply_result(adapter, result, tools)
        tree.record_action(outcome.action)
        tree.add_reward(outcome.reward + result.reward)
        default_status = RolloutStatus.TRUNCATED if tree.refusal else RolloutStatus.TERMINATED
        last_result, fields = adapter.last_result, LastResultFields(adapter.last_result)
        all_fields = {**result.fields, **fields} if result.fields else fields
        status = outcome.status or default_status
        return EpisodeEnd(
            status,
            all_fields,
            success=last_result.success,
            hit_limit=bool(tree.refusal) and outcome.status is None,
        )


async def _apply_result(
    adapter: EnvironmentAdapter, result: AgentResult, tools: EpisodeTools | None
) -> StepOutcome:
    """Apply the agent's answer or action, and return the outcome with the tool calls' rewards."""
    if tools is not None and tools.status is not None:
        return StepOutcome([], tools.reward, tools.status)
    outcome = StepOutcome([])
    if result.answer is not None:
        outcome = await adapter.act(THINK.get_answer(result.answer))
    elif result.action is not None:
        outcome = await adapter.step({"action": result.action})
    return outcome if tools is None else replace(outcome, reward=outcome.reward + tools.reward)


def _find_own_address() -> str:
    """Return the address at which other machines can reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        try:
            probe_socket.connect(("192.0.2.1", 9))  # a reserved address; nothing is sent
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        return str(probe_socket.getsockname()[0])
