"""The environment's side of one episode, as the policy sees it.

    opening()           the first messages
    apply_text(text)    the messages, the reward or the end that follow a completion

Every completion is an action, unless it calls a tool (see `tool_adapter`).
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
from ludus.trainer.rollout.adapters.renderer import ChatRenderer, ServerRenderer


@dataclass(frozen=True, slots=True)
class Opening:
    """The first messages of an episode, and the tools that the policy can call."""

    messages: list[Message]
    tools: Sequence[ToolSpec] = ()


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The environment's response to a completion."""

    messages: list[Message]
    """Next messages for the policy; empty if the environment terminated the episode."""
    reward: float = 0.0
    status: RolloutStatus | None = None
    """Status in which the episode ended; None while it continues."""
    action: Any = None
    """Action that was sent to the environment; None if the completion contained none."""
    num_calls: int = 0
    """Number of tool calls that the completion made or tried to make."""
    num_calls_failed: int = 0


class EnvironmentAdapter:
    """Renders results as messages and applies completions as actions."""

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
        """The latest result of the episode."""

    async def opening(self) -> Opening:
        """Return the first messages of the episode."""
        return Opening(self._renderer.messages(self.result, first=True))

    @property
    def has_text(self) -> bool:
        """False if the environment shows no text to a language model."""
        return self.result.text is not None or not isinstance(self._renderer, ServerRenderer)

    async def apply_text(self, text: str) -> StepOutcome:
        """Apply a completion; one that is no action ends the episode.

        Raises:
            Exception: anything else failed; the episode is void.
        """
        return await self.act(text)

    async def act(self, text: str) -> StepOutcome:
        """Parse `text` as an action and take the step."""
        try:
            action = self._renderer.action(strip_reasoning(text), self.result)
        except ActionError:
            return StepOutcome([], self._invalid_action_reward, RolloutStatus.INVALID_ACTION)
        return await self.step(action)

    async def step(self, arguments: dict[str, Any]) -> StepOutcome:
        """Take a step with these arguments of `session.step`."""
        try:
            self.result = await self._session.step(**arguments)
        except ActionError:
            invalid = RolloutStatus.INVALID_ACTION
            return StepOutcome([], self._invalid_action_reward, invalid, arguments.get("action"))
        action = arguments.get("action", arguments)
        reward, status = self.result.reward or 0.0, end_status(self.result)
        if status is RolloutStatus.TERMINATED:
            return StepOutcome([], reward, status, action)
        return StepOutcome(
            self._renderer.messages(self.result, first=False), reward, status, action
        )


def end_status(result: StepResult) -> RolloutStatus | None:
    """Return the status in which the environment ended the episode; None while it continues."""
    if result.terminated:
        return RolloutStatus.TERMINATED
    return RolloutStatus.TRUNCATED if result.truncated else None
