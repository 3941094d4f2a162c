"""An environment adapter for completions that call the environment's tools.

    completion --calls?-- yes --> each tool is called --> its result is a message of role "tool"
                  |
                  +------ no ---> the completion is the action; it ends the episode if the
                                  environment has no text renderer

Tools of a Ludus environment are called between steps. Tools of an OpenEnv MCPEnvironment are its
steps: a call can have a reward and end the episode.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludus.env import Message, StepResult
from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.env.types import EnvironmentDescription, JsonObject, Tool
from ludus.proto.errors import (
    ActionError,
    ActionParseError,
    ConfigError,
    ExecutionError,
    InvalidCallError,
    ToolError,
)
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.models.chat import strip_reasoning
from ludus.trainer.rollout.adapters.environment_adapter import (
    EnvironmentAdapter,
    Opening,
    StepOutcome,
    end_status,
)
from ludus.trainer.rollout.adapters.renderer import ServerRenderer
from ludus.trainer.rollout.adapters.tool_calls import ToolCall, read_calls, tool_spec

MAX_BAD_COMPLETIONS = 3
"""Number of consecutive completions with invalid tool calls that ends the episode."""
MAX_RESULT_CHARACTERS = 4000
"""Maximum length of a tool result that the policy sees."""


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools of an environment, and the way it takes calls and text."""

    tools: tuple[Tool, ...]
    calls_are_steps: bool
    text_is_action: bool
    """True if a completion without a call is an action."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of one tool call."""

    message: Message
    reward: float = 0.0
    status: RolloutStatus | None = None
    """Status in which the call ended the episode; None while it continues."""
    failed: bool = False


class Toolbox:
    """The tools of one environment, which are requested when the first episode starts."""

    def __init__(self, client: AsyncEnvClient, environment: str) -> None:
        self._client = client
        self._environment = environment
        self._offer: ToolOffer | None = None
        self._lock = asyncio.Lock()

    async def offer(self, session: AsyncSession) -> ToolOffer:
        """Return the tools of the environment.

        Raises:
            ConfigError: the environment has no tools.
        """
        async with self._lock:
            if self._offer is None:
                self._offer = await self._request(session)
            return self._offer

    async def _request(self, session: AsyncSession) -> ToolOffer:
        description = await self._client.describe()
        tools = tuple(description.tools)
        is_upstream = not tools and not description.has_text_view
        calls_are_steps = is_upstream or _takes_calls(description)
        if is_upstream:
            # A server of the original OpenEnv lists its tools in a session only.
            response = await session.step({"type": "list_tools"})
            tools = tuple(_make_tool(tool) for tool in response.observation.get("tools", []))
        if not tools:
            raise ConfigError(
                f"environment '{self._environment}': tools = true, but "
                f"'{description.name}' offers no tools; remove it"
            )
        text_is_action = description.has_text_view and not calls_are_steps
        return ToolOffer(tools, calls_are_steps, text_is_action)


class ToolAdapter(EnvironmentAdapter):
    """Applies completions as tool calls, and completions without a call as actions."""

    def __init__(
        self,
        session: AsyncSession,
        first: StepResult,
        toolbox: Toolbox,
        invalid_action_reward: float,
    ) -> None:
        super().__init__(session, first, ServerRenderer(), invalid_action_reward)
        self._toolbox = toolbox
        self._num_bad = 0

    @property
    def has_text(self) -> bool:
        """True, because an observation without text is shown as JSON."""
        return True

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Tools of the environment; available after `opening`."""
        return self._offer.tools

    async def opening(self) -> Opening:
        """Return the first messages and the tools."""
        self._offer = await self._toolbox.offer(self._session)
        tools = [tool_spec(tool) for tool in self._offer.tools]
        if self.result.text is None:
            content = _shorten(json.dumps(self.result.observation))
            return Opening([{"role": "user", "content": content}], tools)
        return Opening(self._renderer.messages(self.result, first=True), tools)

    async def apply_text(self, text: str) -> StepOutcome:
        """Call the tools, or take the action; report invalid calls to the policy."""
        try:
            calls = read_calls(strip_reasoning(text))
            self._check_names(calls)
        except ActionParseError as error:
            self._num_bad += 1
            if self._num_bad >= MAX_BAD_COMPLETIONS:
                reward, status = self._invalid_action_reward, RolloutStatus.INVALID_ACTION
                return StepOutcome([], reward, status, num_calls=1, num_calls_failed=1)
            message = _tool_message({"error": error.message})
            return StepOutcome([message], num_calls=1, num_calls_failed=1)
        self._num_bad = 0
        if calls:
            return await self._call_all(calls)
        if self._offer.text_is_action:
            return await self.act(text)
        # The environment takes no text, so this completion ends the episode.
        return StepOutcome([], 0.0, RolloutStatus.TERMINATED)

    def _check_names(self, calls: Sequence[ToolCall]) -> None:
        names = [tool.name for tool in self._offer.tools]
        unknown_name = next((call.name for call in calls if call.name not in names), None)
        if unknown_name is not None:
            raise ActionParseError(
                f"expected one of the tools {', '.join(names)}, got {unknown_name[:100]!r}"
            )

    async def _call_all(self, calls: Sequence[ToolCall]) -> StepOutcome:
        actions: list[JsonObject] = []
        results: list[CallResult] = []
        for call in calls:
            actions.append({"tool": call.name, "arguments": call.arguments})
            results.append(await self.call(call))
            if results[-1].status is not None:
                break
        status = results[-1].status
        messages = [result.message for result in results]
        return StepOutcome(
            [] if status is RolloutStatus.TERMINATED else messages,
            sum(result.reward for result in results),
            status,
            actions,
            num_calls=len(results),
            num_calls_failed=sum(result.failed for result in results),
        )

    async def call(self, call: ToolCall) -> CallResult:
        """Call one tool and return its result; a tool's own error is a result for the policy.

        Raises:
            EnvError: something other than the tool failed, which the policy cannot handle.
        """
        try:
            if not self._offer.calls_are_steps:
                returned = await self._session.call_tool(call.name, call.arguments)
                return CallResult(_tool_message(returned))
            action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            self.result = await self._session.step(action)
        except (ToolError, ExecutionError, ActionError, InvalidCallError) as error:
            return CallResult(_tool_message({"error": error.message}), failed=True)
        message = _tool_message(_call_content(self.result.observation))
        has_failed = bool(self.result.observation.get("error"))
        return CallResult(message, self.result.reward or 0.0, end_status(self.result), has_failed)


def _takes_calls(description: EnvironmentDescription) -> bool:
    """Return True if a tool call is an action, as with the types of OpenEnv."""
    schema = description.action_schema
    has_base_type = schema.get("title") == "Action"
    return has_base_type or "tool_name" in schema.get("properties", {})


def _make_tool(entry: JsonObject) -> Tool:
    schema = entry.get("input_schema") or entry.get("inputSchema") or {}
    if not isinstance(entry.get("name"), str):
        raise ToolError(f"expected tools with names, got one like {str(entry)[:100]!r}")
    return Tool(entry["name"], str(entry.get("description") or ""), schema)


def _call_content(observation: JsonObject) -> Any:
    """Return the part of OpenEnv's observation of a call that is useful to the policy."""
    if observation.get("error"):
        return {"error": observation["error"]}
    result = observation.get("result", observation)
    if not isinstance(result, dict):
        return result
    for key in ("data", "structured_content", "content"):
        if result.get(key) is not None:
            return result[key]
    return result


def _tool_message(content: Any) -> Message:
    text = content if isinstance(content, str) else json.dumps(content)
    return {"role": "tool", "content": _shorten(text)}


def _shorten(text: str) -> str:
    num_cut = len(text) - MAX_RESULT_CHARACTERS
    if num_cut <= 0:
        return text
    return f"{text[:MAX_RESULT_CHARACTERS]}... ({num_cut} more characters)"
