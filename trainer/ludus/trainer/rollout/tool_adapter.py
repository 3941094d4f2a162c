"""An environment adapter whose answers call the environment's tools.

    answer --calls?-- yes --> each tool is called --> its result is a message of role "tool"
              |
              +------ no ---> the answer is the action; without a text renderer it is the last word

Environments of our own are called between steps. Tools of an OpenEnv MCPEnvironment are its
steps: they may be rewarded, and end the episode.
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
from ludus.trainer.rollout.environment_adapter import (
    EnvironmentAdapter,
    Opening,
    Reply,
    status_of,
)
from ludus.trainer.rollout.renderer import ServerRenderer
from ludus.trainer.rollout.tool_calls import ToolCall, read_calls, tool_spec

MAX_BAD_ANSWERS = 3
"""In a row that call no tool in a way that can be understood, before the episode ends."""
MAX_RESULT_CHARACTERS = 4000
"""Of one tool result that a model is shown."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """What an environment offers."""

    tools: tuple[Tool, ...]
    calls_are_steps: bool
    answers_are_actions: bool
    """Whether text without a call can be played."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """What came of one call."""

    message: Message
    reward: float = 0.0
    status: RolloutStatus | None = None
    failed: bool = False


class Toolbox:
    """The tools of one environment; asked for when the first episode begins."""

    def __init__(self, client: AsyncEnvClient, environment: str) -> None:
        self._client = client
        self._environment = environment
        self._offer: _Offer | None = None
        self._asking = asyncio.Lock()

    async def offer(self, session: AsyncSession) -> _Offer:
        """What the environment offers.

        Raises:
            ConfigError: it has no tools.
        """
        async with self._asking:
            if self._offer is None:
                self._offer = await self._ask(session)
            return self._offer

    async def _ask(self, session: AsyncSession) -> _Offer:
        description = await self._client.describe()
        tools = tuple(description.tools)
        is_upstream = not tools and not description.has_text_view
        calls_are_steps = is_upstream or _takes_calls(description)
        if is_upstream:
            # A server of OpenEnv's own names its tools in a session only.
            listed = await session.step({"type": "list_tools"})
            tools = tuple(_tool_of(tool) for tool in listed.observation.get("tools", []))
        if not tools:
            raise ConfigError(
                f"environment '{self._environment}': tools = true, but "
                f"'{description.name}' offers no tools; remove it"
            )
        answers_are_actions = description.has_text_view and not calls_are_steps
        return _Offer(tools, calls_are_steps, answers_are_actions)


class ToolAdapter(EnvironmentAdapter):
    """Answers call tools; what is no call is an action."""

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
    def has_words(self) -> bool:
        """True: what has no text is shown as JSON."""
        return True

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What the environment offers, once the opening is known."""
        return self._offer.tools

    async def opening(self) -> Opening:
        """The first result, and the tools."""
        self._offer = await self._toolbox.offer(self._session)
        tools = [tool_spec(tool) for tool in self._offer.tools]
        if self.result.text is None:
            content = _shortened(json.dumps(self.result.observation))
            return Opening([{"role": "user", "content": content}], tools)
        return Opening(self._renderer.messages(self.result, first=True), tools)

    async def reply(self, text: str) -> Reply:
        """Results of the tools, or of the action; what cannot be read is said, three times."""
        try:
            calls = read_calls(strip_reasoning(text))
            unknown = self._unknown(calls)
            if unknown:
                raise ActionParseError(unknown)
        except ActionParseError as error:
            self._num_bad += 1
            if self._num_bad >= MAX_BAD_ANSWERS:
                reward, status = self._invalid_action_reward, RolloutStatus.INVALID_ACTION
                return Reply([], reward, status, num_calls=1, num_calls_failed=1)
            said = _tool_message({"error": error.message})
            return Reply([said], num_calls=1, num_calls_failed=1)
        self._num_bad = 0
        if calls:
            return await self._called(calls)
        if self._offer.answers_are_actions:
            return await self.act(text)
        # Nothing more is to be done here: the answer is what rewards look at.
        return Reply([], 0.0, RolloutStatus.TERMINATED)

    def _unknown(self, calls: Sequence[ToolCall]) -> str:
        known = [tool.name for tool in self._offer.tools]
        wrong = next((call.name for call in calls if call.name not in known), None)
        if wrong is None:
            return ""
        return f"expected one of the tools {', '.join(known)}, got {wrong[:100]!r}"

    async def _called(self, calls: Sequence[ToolCall]) -> Reply:
        made: list[JsonObject] = []
        results: list[CallResult] = []
        for call in calls:
            made.append({"tool": call.name, "arguments": call.arguments})
            results.append(await self.call(call))
            if results[-1].status is not None:
                break
        status = results[-1].status
        shown = [] if status is RolloutStatus.TERMINATED else [one.message for one in results]
        return Reply(
            shown,
            sum(one.reward for one in results),
            status,
            made,
            num_calls=len(results),
            num_calls_failed=sum(one.failed for one in results),
        )

    async def call(self, call: ToolCall) -> CallResult:
        """What one tool returned; that it failed is for the model to know.

        Raises:
            EnvError: it was not the tool that failed, and the model can do nothing about it.
        """
        try:
            if not self._offer.calls_are_steps:
                returned = await self._session.call_tool(call.name, call.arguments)
                return CallResult(_tool_message(returned))
            action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            self.result = await self._session.step(action)
        except (ToolError, ExecutionError, ActionError, InvalidCallError) as error:
            return CallResult(_tool_message({"error": error.message}), failed=True)
        shown = _tool_message(_returned(self.result.observation))
        failed = bool(self.result.observation.get("error"))
        return CallResult(shown, self.result.reward or 0.0, status_of(self.result), failed)


def _takes_calls(description: EnvironmentDescription) -> bool:
    """True where a tool call is an action: with OpenEnv's own types."""
    schema = description.action_schema
    has_base_type = schema.get("title") == "Action"
    return has_base_type or "tool_name" in schema.get("properties", {})


def _tool_of(listed: JsonObject) -> Tool:
    schema = listed.get("input_schema") or listed.get("inputSchema") or {}
    if not isinstance(listed.get("name"), str):
        raise ToolError(f"expected tools with names, got one like {str(listed)[:100]!r}")
    return Tool(listed["name"], str(listed.get("description") or ""), schema)


def _returned(observation: JsonObject) -> Any:
    """What is worth showing of OpenEnv's observation of a call."""
    if observation.get("error"):
        return {"error": observation["error"]}
    result = observation.get("result", observation)
    if not isinstance(result, dict):
        return result
    for key in ("data", "structured_content", "content"):
        if result.get(key) is not None:
            return result[key]
    return result


def _tool_message(returned: Any) -> Message:
    text = returned if isinstance(returned, str) else json.dumps(returned)
    return {"role": "tool", "content": _shortened(text)}


def _shortened(text: str) -> str:
    rest = len(text) - MAX_RESULT_CHARACTERS
    return text if rest <= 0 else f"{text[:MAX_RESULT_CHARACTERS]}... ({rest} more characters)"
