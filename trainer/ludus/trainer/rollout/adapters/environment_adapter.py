"""The environment's side of one episode, as the policy sees it.

    opening()           the first messages
    apply_text(text)    the messages, the reward or the end that follow a completion

Every completion is an action, unless it calls a tool (see `tool_adapter`). A renderer turns results
into messages and completions into actions: the environment's own renderer, or the functions that
the configuration names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ludus.env import Message, StepResult
from ludus.env.client import AsyncSession
from ludus.proto.config import EnvironmentConfig
from ludus.proto.errors import ActionError, ConfigError, LudusError, UserError
from ludus.trainer.core.functions import import_object
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.data.failures import describe_error
from ludus.trainer.models.chat import ToolSpec, strip_reasoning

NO_PICTURES = (
    "and policies read text only, not the arrays of its observations; give it a text_renderer (for"
    " Gymnasium's pictures, set option picture_columns; for Atari, set obs_type = 'ram')"
)
"""Reason why an environment of pictures cannot be trained on, and the remedy."""


class RendererError(LudusError):
    """`render` or `parse` of the configuration raised, or returned no messages."""


class ServerRenderer:
    """The environment's own renderer and parser, which run on the server."""

    def messages(self, result: StepResult, *, first: bool) -> list[Message]:
        """Return the messages that came with the result."""
        if result.text is None:
            reason = f", {NO_PICTURES}" if result.tensors else ""
            raise ConfigError(
                f"the environment shows no text to language models{reason}; set environment.render"
                " and environment.parse to 'module:callable'"
            )
        return result.text.messages

    def action(self, text: str, result: StepResult) -> dict[str, Any]:
        """Return the text unchanged: the server parses it."""
        return {"text": text}


class ImportedRenderer:
    """`render` and `parse` of the run configuration."""

    def __init__(self, render: str, parse: str) -> None:
        self._paths = render, parse
        self._render = import_object(render, "environment.render")
        self._parse = import_object(parse, "environment.parse")

    def messages(self, result: StepResult, *, first: bool) -> list[Message]:
        """Return the messages that `render` returns for the observation."""
        path = f"environment.render = '{self._paths[0]}'"
        try:
            messages = self._render(result.observation, first=first)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the run's custom code
            raise RendererError(f"{path} raised {describe_error(error)}") from error
        if not _are_messages(messages):
            raise RendererError(
                f"{path} must return a list of messages like {{'role': 'user', 'content': "
                f"'...'}}, but it returned {messages!r:.100}"
            )
        return messages

    def action(self, text: str, result: StepResult) -> dict[str, Any]:
        """Return the action that `parse` returns; an ActionError means that there is none."""
        try:
            return {"action": self._parse(text, result.observation)}
        except (UserError, ActionError):
            raise
        except (Exception, SystemExit) as error:  # the run's custom code
            raise RendererError(
                f"environment.parse = '{self._paths[1]}' raised {describe_error(error)}; for a "
                "text that "
                f"is no action it must raise ActionParseError, and the text was {text[:100]!r}"
            ) from error


ChatRenderer: TypeAlias = ServerRenderer | ImportedRenderer


def make_renderer(config: EnvironmentConfig) -> ChatRenderer:
    """Return the renderer that the configuration selects."""
    if config.render is None or config.parse is None:
        return ServerRenderer()
    return ImportedRenderer(config.render, config.parse)


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
        return Opening(self._renderer.messages(self.result, first=True))

    @property
    def has_text(self) -> bool:
        """False if the environment shows no text to a language model."""
        return self.result.text is not None or not isinstance(self._renderer, ServerRenderer)

    async def apply_text(self, text: str) -> StepOutcome:
        """Apply a completion; one that is no action ends the episode."""
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


def _are_messages(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    )
