"""Random responses that replace the policy in the warm start of a tiny model.

    tools and legal answers   a call or an answer, with equal probability
    only tools                a call
    only legal answers        an answer

The agent plays its episodes as usual, so the model sees the agent's own prompts, its tools and
their results, and learns the format of calls. It does not learn which calls are good. Arguments are
drawn from the tool's JSON schema. An argument of any other type is one of the environment's legal
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from ludus.env.text.unicode import format_json
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
"""Bounds of integers if the schema contains no bounds."""
_MAX_ITEMS = 2


@dataclass(slots=True)
class _OpenConversation:
    """A conversation, and the messages with which its next request must start."""

    messages: list[ChatMessage]
    exchanges: Conversation = field(default_factory=list)


class RandomResponder:
    """A responder that draws random responses to the requests of one agent."""

    def __init__(self, generator: Random, answers: Sequence[str], max_turns: int) -> None:
        """Create the responder. `answers` are the environment's legal answers."""
        self._random = generator
        self._answers = answers
        self._num_turns_left = max_turns
        self._open_conversations: list[_OpenConversation] = []

    @property
    def conversations(self) -> list[Conversation]:
        """All conversations so far, for the training of a model."""
        return [conversation.exchanges for conversation in self._open_conversations]

    async def respond(self, request: PolicyRequest) -> list[PolicyResponse]:
        if request.num_completions > self._num_turns_left:
            raise LimitError(
                "the episode has reached its maximum number of turns",
                status=403,
                code="max_turns_reached",
            )
        self._num_turns_left -= request.num_completions
        return [self._respond(request) for _ in range(request.num_completions)]

    def check_body_size(self, num_bytes: int) -> None:
        """Accept every size, because prompts are not encoded."""

    def _respond(self, request: PolicyRequest) -> PolicyResponse:
        text = self._draw_text(request)
        response = replace(parse_response(text, request.tools), num_tokens=1)
        conversation = self._find_conversation(request)
        new_messages = request.messages[len(conversation.messages) :]
        conversation.exchanges.append(
            Exchange([message.template_message for message in new_messages], text, request.tools)
        )
        conversation.messages = [*request.messages, response.chat_message]
        return response

    def _find_conversation(self, request: PolicyRequest) -> _OpenConversation:
        for conversation in reversed(self._open_conversations):
            first_messages = request.messages[: len(conversation.messages)]
            has_same_messages = _make_keys(first_messages) == _make_keys(conversation.messages)
            if has_same_messages and list(conversation.exchanges[0].tools) == list(request.tools):
                return conversation
        self._open_conversations.append(_OpenConversation([]))
        return self._open_conversations[-1]

    def _draw_text(self, request: PolicyRequest) -> str:
        may_answer = bool(self._answers) and not (request.requires_call and request.tools)
        if request.tools and not (may_answer and self._random.random() < 0.5):
            function = self._random.choice(request.tools)["function"]
            arguments = self._draw_value(function["parameters"])
            call = {"name": function["name"], "arguments": arguments}
            return f"<tool_call>{format_json(call)}</tool_call>"
        if not self._answers:
            raise ConfigError(
                "model.kind = 'tiny' learns the format from legal answers and tool calls, but the "
                "environment lists no legal answers and its agent offers no tools; let "
                "legal_answers() of the text_renderer list them, or use model.kind = 'pretrained' "
                "with an instruction-tuned model"
            )
        return self._random.choice(self._answers)

    def _draw_value(self, schema: Any) -> Any:
        """Return a random value for a JSON schema with the keywords that tools commonly use."""
        if not isinstance(schema, dict):
            return self._draw_answer()
        for keyword in ("enum", "anyOf", "oneOf"):
            if schema.get(keyword):
                chosen_schema = self._random.choice(schema[keyword])
                return chosen_schema if keyword == "enum" else self._draw_value(chosen_schema)
        if "const" in schema:
            return schema["const"]
        schema_type = schema.get("type")
        match schema_type if isinstance(schema_type, str) else next(iter(schema_type or ("any",))):
            case "object":
                properties = schema.get("properties") or {}
                return {name: self._draw_value(subschema) for name, subschema in properties.items()}
            case "array":
                num_items = self._random.randint(schema.get("minItems", 0), _MAX_ITEMS)
                return [self._draw_value(schema.get("items")) for _ in range(num_items)]
            case "integer" | "number":
                minimum = schema.get("minimum", _MIN_INTEGER)
                maximum = schema.get("maximum", minimum + _MAX_INTEGER)
                return self._random.randint(int(minimum), int(maximum))
            case "boolean":
                return self._random.random() < 0.5
            case "null":
                return None
        return self._draw_answer()

    def _draw_answer(self) -> str:
        return self._random.choice(self._answers) if self._answers else ""


async def play_with_random_responses(
    agent: AgentHost, adapter: EnvironmentAdapter, seed: int, generator: Random, max_turns: int
) -> list[Conversation]:
    """Play an episode and return its conversations.

    They are returned even if the agent fails, because they contain the agent's prompts.

    Raises:
        AgentError: the agent sent no request.
        ConfigError: the environment has neither legal answers nor tools.
    """
    text_view = adapter.last_result.text
    answers = text_view.legal_answers if text_view else ()
    responder = RandomResponder(generator, answers, max_turns)
    try:
        await agent.play(adapter, seed, responder, make_tools(adapter))
    except AgentError:
        if not responder.conversations:
            raise
    if not responder.conversations:
        raise AgentError(NO_REQUEST)
    return responder.conversations


def _make_keys(messages: Sequence[ChatMessage]) -> list[tuple[Any, ...]]:
    return [(message.role, *message.key) for message in messages]
