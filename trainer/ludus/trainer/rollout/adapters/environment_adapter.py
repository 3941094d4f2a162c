"""The environment of one episode, as the policy sees it.

    make_opening()      return the first messages
    apply_text(text)    apply a completion; return its reward and the next messages

Every completion is an action, unless it calls a tool (see `tool_adapter`). A renderer turns results
into messages, and completions into actions. It is the environment's own renderer or a pair of
functions in the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ludus.env import Message, StepResult, ToolResult
from ludus.env.client import AsyncSession
from ludus.env.types import MESSAGE_ROLES, has_message_role
from ludus.proto.config import EnvironmentConfig
from ludus.proto.errors import ActionError, ConfigError, LudusError, UserError
from ludus.trainer.core.functions import import_callable
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.data.failures import describe_error
from ludus.trainer.models.tool_calls import ToolSpec

NO_TEXT_REASON = (
    "and policies read text only, not the arrays of its observations; give it a text_renderer (for"
    " Gymnasium's pictures, set option picture_columns; for Atari, set obs_type = 'ram')"
)
"""Reason why an environment that shows only pictures cannot be used, and the remedy."""


class RendererError(LudusError):
    """An error in the configuration's `render` or `parse`, or in the messages of a renderer."""


class ServerRenderer:
    """The environment's own renderer and parser, which the server runs."""

    def __init__(self, environment: str) -> None:
        """`environment` is the name of the environment in the run, for messages."""
        self._environment = environment

    def render_messages(self, result: StepResult, *, is_first: bool) -> list[Message]:
        """Return the messages that the server rendered for the result."""
        if result.text is None:
            reason = f", {NO_TEXT_REASON}" if result.tensors else ""
            raise ConfigError(
                f"environment '{self._environment}' shows no text to language models{reason}; set"
                " environment.render and environment.parse to 'module:callable'"
            )
        source = f"the text_renderer of environment '{self._environment}'"
        return check_messages(result.text.messages, source, is_first=is_first)

    def parse_action(self, text: str, result: StepResult) -> dict[str, Any]:
        """Return the text unchanged, because the server parses it."""
        return {"text": text}


class ImportedRenderer:
    """The `render` and `parse` functions of the run configuration."""

    def __init__(self, render: str, parse: str, environment: str) -> None:
        self._paths = render, parse
        self._environment = environment
        self._render = import_callable(render, "environment.render")
        self._parse = import_callable(parse, "environment.parse")

    def render_messages(self, result: StepResult, *, is_first: bool) -> list[Message]:
        """Return the messages that `render` returns for the observation."""
        field_description = (
            f"environment.render = '{self._paths[0]}' of environment '{self._environment}'"
        )
        try:
            messages = self._render(result.observation, first=is_first)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the run's custom code
            raise RendererError(f"{field_description} raised {describe_error(error)}") from error
        return check_messages(messages, field_description, is_first=is_first)

    def parse_action(self, text: str, result: StepResult) -> dict[str, Any]:
        """Return the action in the text, as `parse` reads it.

        Raises:
            ActionError: the text contains no valid action.
        """
        try:
            return {"action": self._parse(text, result.observation)}
        except (UserError, ActionError):
            raise
        except (Exception, SystemExit) as error:  # the run's custom code
            raise RendererError(
                f"environment.parse = '{self._paths[1]}' raised {describe_error(error)}; for a "
                f"text that is no action it must raise ActionParseError, and the text was "
                f"{text[:100]!r}"
            ) from error


ChatRenderer: TypeAlias = ServerRenderer | ImportedRenderer


def make_renderer(config: EnvironmentConfig, environment: str) -> ChatRenderer:
    """Return the renderer that the configuration of the environment with this name selects."""
    if config.render is None or config.parse is None:
        return ServerRenderer(environment)
    return ImportedRenderer(config.render, config.parse, environment)


def check_messages(messages: Any, source: str, *, is_first: bool) -> list[Message]:
    """Return the messages if a chat template can render them.

    Args:
        source: description of the renderer.
        is_first: whether the messages start an episode.

    Raises:
        RendererError: the value is not a list of messages, or starts an episode without a user.
    """
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        rule = f" with one of the roles {', '.join(MESSAGE_ROLES)}"
    elif is_first and all(message["role"] != "user" for message in messages):
        rule = ", at least one of them with role 'user' at the start of an episode"
    else:
        return messages
    raise RendererError(
        f"{source} must return a list of messages like {{'role': 'user', 'content': '...'}}{rule}, "
        f"but it returned {messages!a:.100}"
    )


@dataclass(frozen=True, slots=True)
class Opening:
    """The first messages of an episode, and the tools that the policy can call."""

    messages: list[Message]
    tools: Sequence[ToolSpec] = ()


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The environment's response to a completion."""

    messages: list[Message]
    """Messages for the policy, such as the results of tool calls. If the episode has ended, the
    policy does not see them. Empty if a step terminated the episode."""
    reward: float = 0.0
    status: RolloutStatus | None = None
    """Status of the ended episode; None if the episode continues."""
    action: Any = None
    """Action that was sent to the environment; None if the completion contained none."""
    num_calls: int = 0
    """Number of tool calls that the completion made or tried to make."""
    num_calls_failed: int = 0


class EnvironmentAdapter:
    """An environment that receives completions as actions and shows results as messages."""

    def __init__(
        self,
        session: AsyncSession,
        first_result: StepResult,
        renderer: ChatRenderer,
        invalid_action_reward: float,
    ) -> None:
        self._session = session
        self._renderer = renderer
        self._invalid_action_reward = invalid_action_reward
        self.last_result = first_result
        """Last result of the session: the first result, or that of the last step."""

    async def make_opening(self) -> Opening:
        return Opening(self._renderer.render_messages(self.last_result, is_first=True))

    @property
    def has_text(self) -> bool:
        """True if the environment shows text to a language model."""
        return self.last_result.text is not None or not isinstance(self._renderer, ServerRenderer)

    async def apply_text(self, text: str) -> StepOutcome:
        """Apply a completion without thoughts. One without a valid action ends the episode."""
        return await self.act(text)

    async def act(self, text: str) -> StepOutcome:
        """Parse `text` as an action and take the step with it."""
        try:
            action = self._renderer.parse_action(text, self.last_result)
        except ActionError:
            return StepOutcome([], self._invalid_action_reward, RolloutStatus.INVALID_ACTION)
        return await self.step(action)

    async def step(self, arguments: dict[str, Any]) -> StepOutcome:
        """Take a step with these arguments of `session.step`."""
        try:
            self.last_result = await self._session.step(**arguments)
        except ActionError:
            status = RolloutStatus.INVALID_ACTION
            return StepOutcome([], self._invalid_action_reward, status, arguments.get("action"))
        action = arguments.get("action", arguments)
        reward, end_status = self.last_result.reward or 0.0, read_end_status(self.last_result)
        if end_status is RolloutStatus.TERMINATED:
            return StepOutcome([], reward, end_status, action)
        messages = self._renderer.render_messages(self.last_result, is_first=False)
        return StepOutcome(messages, reward, end_status, action)


def read_end_status(result: StepResult | ToolResult) -> RolloutStatus | None:
    """Return the status of an episode that the environment ended; None if it continues."""
    if result.terminated:
        return RolloutStatus.TERMINATED
    return RolloutStatus.TRUNCATED if result.truncated else None


def _is_message(message: Any) -> bool:
    return has_message_role(message) and isinstance(message.get("content"), str)
