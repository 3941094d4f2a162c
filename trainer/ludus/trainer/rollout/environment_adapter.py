"""The environment's side of one episode, as the policy meets it.

    opening()      what is shown first
    reply(text)    what comes of an answer: messages, a reward, or the end

Every answer is an action, unless it calls a tool: see `tool_adapter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludus.env import Message, StepResult
from ludus.env.client import AsyncSession
from ludus.proto.errors import ActionError
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.models.chat import strip_reasoning
from ludus.trainer.models.template import ToolSpec
from ludus.trainer.rollout.renderer import ChatRenderer, ServerRenderer


@dataclass(frozen=True, slots=True)
class Opening:
    """What the policy is shown first."""

    messages: list[Message]
    tools: Sequence[ToolSpec] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of an answer."""

    messages: list[Message]
    """What the policy is shown next; after the rules have ended the episode, nothing."""
    reward: float = 0.0
    status: RolloutStatus | None = None
    """How the episode has ended; None while it continues."""
    action: Any = None
    """What the environment was asked to do; None where the answer said nothing that it could."""
    num_calls: int = 0
    """Of tools that the answer made, or meant to make; the failed ones included."""
    num_calls_failed: int = 0


class EnvironmentAdapter:
    """Shows results and takes answers as actions, in the words of the environment's renderer."""

    def __init__(
        self,
        session: AsyncSession,
        first: StepResult,
        renderer: ChatRenderer,
        invalid_action_reward: float,
    ) -> None:
        self._session = session
        self._renderer = renderer
        self._invalid_action_reward = invalid_action_reward
        self.result = first
        """The newest of the episode."""

    async def opening(self) -> Opening:
        """What the policy is shown first."""
        return Opening(self._renderer.messages(self.result, first=True))

    @property
    def has_words(self) -> bool:
        """False where the environment shows no text to a language model."""
        return self.result.text is not None or not isinstance(self._renderer, ServerRenderer)

    async def reply(self, text: str) -> Reply:
        """What comes of the answer `text`, which ends the episode where it is no action.

        Raises:
            Exception: whatever else fails; the episode is void.
        """
        return await self.act(text)

    async def act(self, text: str) -> Reply:
        """What comes of the answer `text`, taken as an action whatever it says."""
        try:
            action = self._renderer.action(strip_reasoning(text), self.result)
        except ActionError:
            return Reply([], self._invalid_action_reward, RolloutStatus.INVALID_ACTION)
        return await self.step(action)

    async def step(self, action: dict[str, Any]) -> Reply:
        """What comes of a step with these arguments."""
        try:
            self.result = await self._session.step(**action)
        except ActionError:
            invalid = RolloutStatus.INVALID_ACTION
            return Reply([], self._invalid_action_reward, invalid, action.get("action"))
        asked = action.get("action", action)
        reward, status = self.result.reward or 0.0, status_of(self.result)
        if status is RolloutStatus.TERMINATED:
            return Reply([], reward, status, asked)
        return Reply(self._renderer.messages(self.result, first=False), reward, status, asked)


def status_of(result: StepResult) -> RolloutStatus | None:
    """How the environment has ended the episode; None while it continues."""
    if result.terminated:
        return RolloutStatus.TERMINATED
    return RolloutStatus.TRUNCATED if result.truncated else None
