"""The runner that plays episodes with an agent.

    AgentHost.play --> AgentResult --> answer or action --> environment --> reward, status

If the agent fails, exceeds its time limit or returns an unreadable result, the episode is void. If
a limit of the run refused one of its requests, the episode is truncated instead, however the agent
ends, because then the policy or the run is the cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ludus.env import StepResult
from ludus.env.client import AsyncSession
from ludus.proto.errors import AgentError
from ludus.trainer.core.types import RolloutStatus, Sampling
from ludus.trainer.rollout.adapters.environment_adapter import EnvironmentAdapter, StepOutcome
from ludus.trainer.rollout.agents.conversation_tree import ConversationTree
from ludus.trainer.rollout.agents.host import AdapterTools, AgentAttempt, AgentHost
from ludus.trainer.rollout.agents.task import AgentResult, read_result
from ludus.trainer.rollout.episode import EpisodeEnd, LastResult, SessionRunner
from ludus.trainer.rollout.runner import EpisodeStart, RunnerParts


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRunner(SessionRunner[ConversationTree]):
    """Plays each episode with the agent of the environment."""

    agent: AgentHost

    @classmethod
    async def start_fields(cls, parts: RunnerParts) -> dict[str, Any]:
        """Return the started agent."""
        assert parts.config.agent is not None
        return {"agent": await AgentHost.start(parts.config.agent, parts.stack)}

    def make_record(self, start: EpisodeStart, sampling: Sampling) -> ConversationTree:
        """Return an empty tree of requests."""
        return ConversationTree(self.generate, self.chat, self.limits, sampling, start.key)

    async def run(
        self,
        session: AsyncSession,
        first: StepResult,
        start: EpisodeStart,
        record: ConversationTree,
    ) -> EpisodeEnd:
        """Run the agent and apply its result."""
        adapter, tree = self.make_adapter(session, first), record
        attempt = await self.agent.play(adapter, start.seed, tree, tree.record_calls)
        result = self._read_result(attempt, tree)
        if not tree.num_turns:
            tree.refuse_if_full()
            raise AgentError("the agent sent no request to the policy; it must send at least one")
        outcome = await _apply_result(adapter, result, attempt.tools)
        tree.record_action(outcome.action)
        tree.add_reward(outcome.reward + result.reward)
        default = RolloutStatus.TRUNCATED if tree.refusal else RolloutStatus.TERMINATED
        last_result = LastResult(adapter.result)
        fields = {**result.fields, **last_result} if result.fields else last_result
        return EpisodeEnd(outcome.status or default, fields, success=adapter.result.success)

    def _read_result(self, attempt: AgentAttempt, tree: ConversationTree) -> AgentResult:
        """Return the agent's result; an empty one if it failed after a limit had refused it."""
        try:
            if attempt.error is not None:
                raise attempt.error
            return read_result(attempt.value, self.agent.config.answer, tree.last_text)
        except AgentError:
            if tree.refusal and tree.num_turns:
                return AgentResult()
            raise


async def _apply_result(
    adapter: EnvironmentAdapter, result: AgentResult, tools: AdapterTools | None
) -> StepOutcome:
    """Apply the agent's answer or action, and add the rewards of its tool calls."""
    if tools is not None and tools.status is not None:
        return StepOutcome([], tools.reward, tools.status)
    outcome = StepOutcome([])
    if result.answer is not None:
        outcome = await adapter.act(result.answer)
    elif result.action is not None:
        outcome = await adapter.step({"action": result.action})
    return outcome if tools is None else replace(outcome, reward=outcome.reward + tools.reward)
