"""Random responses in place of the policy, for the warm start of a tiny model.

    tools and legal answers    a call or an answer, with equal probability
    only tools, only answers   a call, or an answer

The agent plays its episodes as usual, so the model sees the agent's own prompts, its tools and
their results, and learns how calls are written. It does not learn which calls are good. Arguments
are drawn from the tool's JSON schema; a text without a schema is one of the environment's legal
answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ludus.proto.errors import AgentError, ConfigError
from ludus.trainer.learner.warm_start import Conversation, Exchange
from ludus.trainer.rollout.adapters.environment_adapter import EnvironmentAdapter
from ludus.trainer.rollout.agents.conversation_tree import parse_response
from ludus.trainer.rollout.agents.endpoint.exchange import (
    ChatMessage,
    LimitError,
    PolicyRequest,
    PolicyResponse,
)
from ludus.trainer.rollout.agents.endpoint.server import make_tools
from ludus.trainer.rollout.agents.runner import NO_REQUEST, AgentHost

_MIN_INTEGER, _MAX_INTEGER = 0, 9
"""Default bounds of integers whose schema has none."""
_MAX_ITEMS = 2


@dataclass(slots=True)
class _OpenConversation:
    """A conversation, and the messages with which its next request must start."""

    messages: list[ChatMessage]
    exchanges: Conversation = field(default_factory=list)


class RandomResponder:
    """Responds to the requests of one agent."""

    def __init__(self, draw: random.Random, answers: Sequence[str], max_turns: int) -> None:
        """Create the responder; `answers` are the legal answers that the environment lists."""
        self._draw = draw
        self._answers = answers
        self._num_left = max_turns
        self._open: list[_OpenConversation] = []

    @property
    def conversations(self) -> list[Conversation]:
        """Conversations that a model can learn from."""
        return [conversation.exchanges for conversation in self._open]

    async def respond(self, request: PolicyRequest) -> list[PolicyResponse]:
        if request.num > self._num_left:
            raise LimitError(
                "the episode has reached its maximum number of turns",
                status=403,
                code="max_turns_reached",
            )
        self._num_left -= request.num
        return [self._respond(request) for _ in range(request.num)]

    def _respond(self, request: PolicyRequest) -> PolicyResponse:
        text = self._draw_text(request)
        response = replace(parse_response(text, with_calls=bool(request.tools)), num_tokens=1)
        conversation = self._find_conversation(request)
        new_messages = request.messages[len(conversation.messages) :]
        conversation.exchanges.append(
            Exchange([message.plain for message in new_messages], text, request.tools)
        )
        conversation.messages = [*request.messages, response.as_message]
        return response

    def _find_conversation(self, request: PolicyRequest) -> _OpenConversation:
        for conversation in reversed(self._open):
            start = request.messages[: len(conversation.messages)]
            is_same = _keys(start) == _keys(conversation.messages)
            if is_same and list(conversation.exchanges[0].tools) == list(request.tools):
                return conversation
        self._open.append(_OpenConversation([]))
        return self._open[-1]

    def _draw_text(self, request: PolicyRequest) -> str:
        may_answer = bool(self._answers) and not (request.requires_call and request.tools)
        if request.tools and not (may_answer and self._draw.random() < 0.5):
            function = self._draw.choice(request.tools)["function"]
            arguments = self._draw_value(function["parameters"])
            call = {"name": function["name"], "arguments": arguments}
            return f"<tool_call>{json.dumps(call)}</tool_call>"
        if not self._answers:
            raise ConfigError(
                "model.kind = 'tiny' learns the format from legal answers and tool calls, but the "
                "environment lists no legal answers and its agent offers no tools; let "
                "legal_answers() of the text_renderer list them, or use model.kind = 'pretrained' "
                "with an instruction-tuned model"
            )
        return self._draw.choice(self._answers)

    def _draw_value(self, schema: Any) -> Any:
        """Return a random value for the most common JSON schemas of tools."""
        if not isinstance(schema, dict):
            return self._draw_answer()
        for name in ("enum", "anyOf", "oneOf"):
            if schema.get(name):
                chosen_schema = self._draw.choice(schema[name])
                return chosen_schema if name == "enum" else self._draw_value(chosen_schema)
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        match kind if isinstance(kind, str) else next(iter(kind or ("any",))):
            case "object":
                properties = schema.get("properties") or {}
                return {name: self._draw_value(part) for name, part in properties.items()}
            case "array":
                size = self._draw.randint(schema.get("minItems", 0), _MAX_ITEMS)
                return [self._draw_value(schema.get("items")) for _ in range(size)]
            case "integer" | "number":
                minimum = schema.get("minimum", _MIN_INTEGER)
                maximum = schema.get("maximum", minimum + _MAX_INTEGER)
                return self._draw.randint(int(minimum), int(maximum))
            case "boolean":
                return self._draw.random() < 0.5
            case "null":
                return None
        return self._draw_answer()

    def _draw_answer(self) -> str:
        return self._draw.choice(self._answers) if self._answers else ""


async def play_with_random_responses(
    agent: AgentHost,
    adapter: EnvironmentAdapter,
    seed: int,
    draw: random.Random,
    max_turns: int,
) -> list[Conversation]:
    """Play an episode and return its conversations.

    An agent that fails has still shown its prompts, so its conversations count.

    Raises:
        AgentError: the agent sent no request.
        ConfigError: no legal answer and no tool is known.
    """
    text = adapter.result.text
    responder = RandomResponder(draw, text.legal_answers if text else (), max_turns)
    try:
        await agent.play(adapter, seed, responder, make_tools(adapter))
    except AgentError:
        if not responder.conversations:
            raise
    if not responder.conversations:
        raise AgentError(NO_REQUEST)
    return responder.conversations


def _keys(messages: Sequence[ChatMessage]) -> list[tuple[Any, ...]]:
    return [(message.role, *message.key) for message in messages]
