"""What an agent asks the policy and is told, whichever of OpenAI's forms it came in.

/v1/chat/completions --+                       +--> ConversationTree     the policy
                       +--> Asked --Answerer---+
/v1/responses ---------+      <--- Said        +--> RandomAnswers        a tiny model's warm start
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, Protocol, TypeAlias

from ludus.env import Message
from ludus.trainer.models.template import ToolSpec

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

MessageKey: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""What an answer is recognised by: its words, and the names and arguments of its calls."""

_NO_JSON = (ValueError, RecursionError)
"""What a text raises that is none, or nested deeper than Python reads."""
_CALL_ID_BYTES = 4
"""Enough for the calls of one conversation, and few tokens where an agent shows them."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of one of the agent's tools."""

    name: str
    arguments: str
    """As JSON."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of an agent's history."""

    role: Role
    content: str
    calls: tuple[FunctionCall, ...] = ()

    @property
    def key(self) -> MessageKey:
        """Equal for what an agent was told, and what it sends back of it."""
        return answer_key(self.content, self.calls)

    @property
    def text(self) -> str:
        """The message in words, its calls in the form in which most models write them."""
        return "\n".join(filter(None, [self.content, *map(_call_in_words, self.calls)]))

    @property
    def plain(self) -> Message:
        """The message for the chat template."""
        return {"role": self.role, "content": self.text}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for an answer."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    """What the answer may call; none where the agent wants no call."""
    num: int = 1
    """Answers to the same messages."""
    stop: tuple[str, ...] = ()
    """Texts before which an answer is cut."""
    max_tokens: int | None = None
    seed: int | None = None
    is_one_call: bool = False
    """Whether an answer may make one call at most."""
    must_call: bool = False
    """Whether the agent wants a call whatever happens; nothing forces a policy to make one."""
    with_logprobs: bool = False
    """Whether the agent wants to know the tokens and their log-probs."""


@dataclass(frozen=True, slots=True)
class TokenSaid:
    """A token of an answer."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Said:
    """One answer, as far as the agent is told of it."""

    content: str
    thought: str = ""
    """What stood before the end of a thought."""
    calls: tuple[FunctionCall, ...] = ()
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """That were sampled, and kept."""
    tokens: Sequence[TokenSaid] = field(default=())

    @property
    def as_message(self) -> ChatMessage:
        """The answer as a message of a history."""
        return ChatMessage("assistant", self.content, self.calls)


class Answerer(Protocol):
    """Who answers an agent."""

    async def answer(self, asked: Asked) -> list[Said]:
        """[asked.num] answers.

        Raises:
            ApiError: it cannot be answered, for a reason that the agent is told.
        """


def answer_key(content: str, calls: Sequence[FunctionCall]) -> MessageKey:
    """What an answer is recognised by; clients strip words, and write JSON in their own way."""
    return content.strip(), tuple((call.name, _canonical(call.arguments)) for call in calls)


def call_ids(asked: Asked, said: Said) -> list[str]:
    """The id of each call in an answer: the same whenever the same is said after the same history.

    Some agents write ids into the words of their next request. Random ones would be noise to the
    policy there, and no run could be played again.
    """
    history = [(one.role, one.content, one.calls) for one in asked.messages]
    spoken = repr((history, said.content, said.calls)).encode()
    return [
        f"call_{blake2b(spoken, digest_size=_CALL_ID_BYTES, salt=number.to_bytes(2)).hexdigest()}"
        for number in range(len(said.calls))
    ]


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except _NO_JSON:
        return arguments.strip()


def _call_in_words(call: FunctionCall) -> str:
    try:
        arguments: Any = json.loads(call.arguments)
    except _NO_JSON:
        arguments = call.arguments
    return f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': arguments})}\n</tool_call>"
