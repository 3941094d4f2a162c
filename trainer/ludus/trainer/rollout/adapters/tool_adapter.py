"""An environment adapter for completions that call the environment's tools.

    completion --calls?-- yes --> each tool is called --> its result is a message of role "tool"
                  |
                  +------ no ---> the completion is the action; it ends the episode if the
                                  environment has no text renderer

The model receives the error of an invalid call and can correct the call.

A tool call can have a reward and end the episode. It is not a step of a Ludus environment, but each
tool call is a step of an OpenEnv MCPEnvironment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ludus.env import Message, StepResult
from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.env.text.unicode import format_json
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
from ludus.trainer.models.messages import make_result
from ludus.trainer.models.tool_calls import HERMES, CallForm, ToolCall, ToolSpec
from ludus.trainer.rollout.adapters.environment_adapter import (
    EnvironmentAdapter,
    Opening,
    ServerRenderer,
    StepOutcome,
    read_end_status,
)
from ludus.trainer.rollout.transcript import cut_text

MAX_INVALID_COMPLETIONS = 3
"""Number of consecutive completions with an invalid call that ends the episode."""
MAX_RESULT_CHARACTERS = 4000
"""Maximum number of characters of a tool result that the policy sees."""


class Toolbox:
    """The tools of one environment, requested from the server by the first episode."""

    def __init__(
        self, client: AsyncEnvClient, environment: str, setting: str = "tools = true"
    ) -> None:
        """`setting` is the user's setting that asks for tools, for messages."""
        self.tools: tuple[Tool, ...] = ()
        """Tools of the environment; empty until `load` returns."""
        self.calls_are_steps = False
        """True if each tool call is a step of the environment."""
        self.text_is_action = False
        """True if a completion without a call is an action."""
        self.environment = environment
        """Name of the environment, for messages."""
        self._client = client
        self._setting = setting
        self._lock = asyncio.Lock()

    @property
    def specs(self) -> list[ToolSpec]:
        """The tools in the form that chat templates use."""
        return [make_tool_spec(tool) for tool in self.tools]

    async def load(self, session: AsyncSession) -> None:
        """Request the tools from the server, unless another episode has already done so."""
        async with self._lock:
            if self.tools:
                return
            description = await self._client.describe()
            tools = tuple(description.tools)
            is_original_openenv = not tools and not description.has_text_view
            if is_original_openenv:
                # A server built with the original OpenEnv lists its tools only within a session.
                response = await session.step({"type": "list_tools"})
                tools = tuple(_make_tool(tool) for tool in response.observation.get("tools", []))
            if not tools:
                raise ConfigError(
                    f"environment '{self.environment}': {self._setting}, but "
                    f"'{description.name}' offers no tools; remove it"
                )
            self.calls_are_steps = is_original_openenv or _has_call_actions(description)
            self.text_is_action = description.has_text_view and not self.calls_are_steps
            self.tools = tools


class ToolAdapter(EnvironmentAdapter):
    """An environment that receives completions as tool calls, or as actions without calls."""

    def __init__(
        self,
        session: AsyncSession,
        first_result: StepResult,
        toolbox: Toolbox,
        invalid_action_reward: float,
        call_form: CallForm = HERMES,
    ) -> None:
        """`call_form` is the form in which completions call tools."""
        renderer = ServerRenderer(toolbox.environment)
        super().__init__(session, first_result, renderer, invalid_action_reward)
        self.toolbox = toolbox
        self._call_form = call_form
        self._num_invalid_completions = 0

    @property
    def has_text(self) -> bool:
        """True, because an observation without text is shown as JSON."""
        return True

    async def make_opening(self) -> Opening:
        await self.toolbox.load(self._session)
        tools = self.toolbox.specs
        if self.last_result.text is None:
            content = cut_text(format_json(self.last_result.observation), MAX_RESULT_CHARACTERS)
            return Opening([{"role": "user", "content": content}], tools)
        return Opening(self._renderer.render_messages(self.last_result, is_first=True), tools)

    async def apply_text(self, text: str) -> StepOutcome:
        """Call the tools or apply the action in a completion.

        Errors of invalid calls are messages for the policy.
        """
        try:
            calls = self.read_calls(text)
        except ActionParseError as error:
            self._num_invalid_completions += 1
            if self._num_invalid_completions >= MAX_INVALID_COMPLETIONS:
                reward, status = self._invalid_action_reward, RolloutStatus.INVALID_ACTION
                return StepOutcome([], reward, status, num_calls=1, num_calls_failed=1)
            return StepOutcome([make_refusal(error)], num_calls=1, num_calls_failed=1)
        self._num_invalid_completions = 0
        if calls:
            return await self._call_all(calls)
        if self.toolbox.text_is_action:
            return await self.act(text)
        # The environment cannot parse text, so a completion without a call ends the episode.
        return StepOutcome([], 0.0, RolloutStatus.TERMINATED)

    def read_calls(self, text: str) -> list[ToolCall]:
        """Return the calls in a completion without its thoughts.

        Raises:
            ActionParseError: a call cannot be parsed, or there is no such tool.
        """
        calls = self._call_form.read_calls(text, self.toolbox.specs)
        tool_names = [tool.name for tool in self.toolbox.tools]
        unknown_name = next((call.name for call in calls if call.name not in tool_names), None)
        if unknown_name is not None:
            raise ActionParseError(
                f"expected one of the tools {', '.join(tool_names)}, got {unknown_name[:100]!r}"
            )
        return calls

    async def _call_all(self, calls: Sequence[ToolCall]) -> StepOutcome:
        outcomes: list[StepOutcome] = []
        for call in calls:
            outcomes.append(await self.call_tool(call))
            if outcomes[-1].status is not None:
                break
        return StepOutcome(
            [message for outcome in outcomes for message in outcome.messages],
            sum(outcome.reward for outcome in outcomes),
            outcomes[-1].status,
            [outcome.action for outcome in outcomes],
            num_calls=len(outcomes),
            num_calls_failed=sum(outcome.num_calls_failed for outcome in outcomes),
        )

    async def call_tool(self, call: ToolCall) -> StepOutcome:
        """Call one tool and return its result or error as a message for the policy.

        Raises:
            EnvError: something other than the tool failed.
        """
        reward, status, has_failed = 0.0, None, False
        try:
            if self.toolbox.calls_are_steps:
                action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
                self.last_result = await self._session.step(action)
                content = _extract_call_content(self.last_result.observation)
                reward, status = self.last_result.reward or 0.0, read_end_status(self.last_result)
                has_failed = bool(self.last_result.observation.get("error"))
            else:
                result = await self._session.call_tool(call.name, call.arguments)
                content, reward = result.content, result.reward or 0.0
                status = read_end_status(result)
                if status is not None:
                    self.last_result = result.update(self.last_result)
        except (ToolError, ExecutionError, ActionError, InvalidCallError) as error:
            content, has_failed = {"error": error.message}, True
        return StepOutcome(
            [make_result(call, _format_result(content))],
            reward,
            status,
            {"tool": call.name, "arguments": call.arguments},
            num_calls=1,
            num_calls_failed=int(has_failed),
        )


def _has_call_actions(description: EnvironmentDescription) -> bool:
    """Return True if tool calls are actions of the environment, as in OpenEnv's action types."""
    schema = description.action_schema
    return schema.get("title") == "Action" or "tool_name" in schema.get("properties", {})


def _make_tool(tool: JsonObject) -> Tool:
    schema = tool.get("input_schema") or tool.get("inputSchema") or {}
    if not isinstance(tool.get("name"), str):
        raise ToolError(f"expected tools with names, got one like {str(tool)[:100]!r}")
    return Tool(tool["name"], str(tool.get("description") or ""), schema)


def _extract_call_content(observation: JsonObject) -> Any:
    """Return the result or the error in OpenEnv's observation of a call."""
    if observation.get("error"):
        return {"error": observation["error"]}
    call_result = observation.get("result", observation)
    if isinstance(call_result, dict):
        for key in ("data", "structured_content", "content"):
            if call_result.get(key) is not None:
                return call_result[key]
    return call_result


def _format_result(content: Any) -> str:
    text = content if isinstance(content, str) else format_json(content)
    return cut_text(text, MAX_RESULT_CHARACTERS)


def make_refusal(error: ActionParseError) -> Message:
    """Return the message for the policy about a call that cannot be parsed."""
    return {"role": "tool", "content": _format_result({"error": error.message})}


def make_tool_spec(tool: Tool) -> ToolSpec:
    """Return the tool in the form that chat templates use."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}
