"""Runners that play an episode with one conversation: the turn loop, and a rollout function.

       messages               prompt tokens           sampled tokens
adapter -----> conversation ----------------> engine -----------> text
 ^                                                                 |
 +------------------------- apply_text <---------------------------+
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ludus.env import StepResult
from ludus.env.client import AsyncSession
from ludus.proto.errors import ActionError
from ludus.trainer.core.functions import import_object
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.rollout.conversation import Conversation, ConversationFullError
from ludus.trainer.rollout.episode import EpisodeEnd, LastResult, SessionRunner
from ludus.trainer.rollout.runner import EpisodeStart, RunnerParts

RolloutFunction: TypeAlias = Callable[
    [AsyncSession, StepResult, Conversation], Awaitable[EpisodeEnd]
]
"""Plays one episode: (session, first result, conversation) -> end of the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLoopRunner(SessionRunner[Conversation]):
    """Lets the policy and the environment take turns."""

    record_class = Conversation

    async def run(
        self, session: AsyncSession, first: StepResult, start: EpisodeStart, record: Conversation
    ) -> EpisodeEnd:
        """Take turns until the episode ends."""
        adapter = self.make_adapter(session, first)
        opening = await adapter.opening()
        record.offer_tools(opening.tools)
        record.add(opening.messages)
        status: RolloutStatus | None = None
        while status is None:
            if not record.has_room:
                status = RolloutStatus.TRUNCATED
                break
            outcome = await adapter.apply_text(await record.complete())
            record.record_action(outcome.action)
            record.record_calls(outcome.num_calls, outcome.num_calls_failed)
            record.add_reward(outcome.reward)
            record.add(outcome.messages)
            status = outcome.status
        return EpisodeEnd(status, LastResult(adapter.result), success=adapter.result.success)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRunner(TurnLoopRunner):
    """Replaces the turn loop with the rollout function that the configuration names."""

    function: RolloutFunction

    @classmethod
    async def start_fields(cls, parts: RunnerParts) -> dict[str, Any]:
        """Return the imported function."""
        assert parts.config.rollout_function is not None
        return {"function": import_object(parts.config.rollout_function, "environment.rollout")}

    async def run(
        self, session: AsyncSession, first: StepResult, start: EpisodeStart, record: Conversation
    ) -> EpisodeEnd:
        """Call the rollout function."""
        try:
            end = await self.function(session, first, record)
        except ConversationFullError:
            return EpisodeEnd(RolloutStatus.TRUNCATED)
        except ActionError:
            if not record.num_turns:
                # The function chose this action, not the policy.
                raise
            record.add_reward(self.limits.invalid_action_reward)
            return EpisodeEnd(RolloutStatus.INVALID_ACTION)
        if not isinstance(end, EpisodeEnd):
            raise TypeError(
                f"environment '{self.environment}': the rollout function must return "
                f"EpisodeEnd(status, fields), but it returned {end!r:.100}"
            )
        return end
