"""Requests of an agent and the policy's responses, independent of OpenAI's two API formats.

/v1/chat/completions --+                                +--> ConversationTree     the policy
                       +--> PolicyRequest --Responder---+
/v1/responses ---------+    <--- PolicyResponse         +--> RandomResponder      warm start
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Protocol, TypeAlias

from ludus.env import Message
from ludus.proto.errors import LudusError
from ludus.trainer.models.chat import ToolSpec

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

MessageKey: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""Text of a completion, and the names and arguments of its calls; identifies the completion."""

_JSON_ERRORS = (ValueError, RecursionError)
"""Exceptions that `json.loads` raises for invalid or too deeply nested JSON."""
_CALL_ID_BYTES = 4
"""Number of bytes in a call id: unique within a conversation, and few tokens in a prompt."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of one of the agent's tools."""

    name: str
    arguments: str
    """Arguments as JSON."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message in an agent's history."""

    role: Role
    content: str
    calls: tuple[FunctionCall, ...] = ()

    @property
    def key(self) -> MessageKey:
        """Key that is equal for a response and for the message in which an agent repeats it.

        Clients strip text and format JSON in their own way.
        """
        calls = tuple((call.name, _normalize_json(call.arguments)) for call in self.calls)
        return self.content.strip(), calls

    @property
    def text(self) -> str:
        """Text of the message, with its calls in the form in which most models write them."""
        return "\n".join(filter(None, [self.content, *map(_tagged_call, self.calls)]))

    @property
    def plain(self) -> Message:
        """Message for the chat template."""
        return {"role": self.role, "content": self.text}


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """A request for completions of the policy."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    """Tools that a completion may call."""
    num: int = 1
    """Number of completions."""
    stop: tuple[str, ...] = ()
    """Texts before which a completion is cut."""
    max_tokens: int | None = None
    seed: int | None = None
    max_one_call: bool = False
    """True if a completion may contain at most one call."""
    requires_call: bool = False
    """True if the agent requires a call; the policy is not forced to make one."""
    with_logprobs: bool = False
    """True if the response must contain the tokens and their log-probs."""


@dataclass(frozen=True, slots=True)
class PolicyResponse:
    """A completion in the form that the agent receives."""

    content: str
    reasoning: str = ""
    """Text before the end of the reasoning."""
    calls: tuple[FunctionCall, ...] = ()
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Number of sampled tokens after the cut."""
    tokens: Sequence[tuple[str, float]] = ()
    """Text and log-prob of each sampled token; empty if they were not requested."""

    @property
    def as_message(self) -> ChatMessage:
        """Response as a message of a history."""
        return ChatMessage("assistant", self.content, self.calls)


class ApiError(LudusError):
    """A request that cannot be served, with the error that the agent receives.

    OpenAI's clients automatically retry after 408, 409, 429 and 5xx. A request that would fail
    again gets another status.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """Body of the HTTP response."""
        fields = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": {**fields, "code": self.code}}


class LimitError(ApiError):
    """A limit of the run leaves no room for the completion; the episode ends as truncated."""


class FieldError(ApiError):
    """A field of a request has an invalid value."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(f"{param}: {message}", param=param, code=code)


class Responder(Protocol):
    """A component that responds to the requests of one agent."""

    async def respond(self, request: PolicyRequest) -> list[PolicyResponse]:
        """Return [request.num] responses.

        Raises:
            ApiError: the request cannot be served; the agent receives the error.
        """


def call_ids(request: PolicyRequest, response: PolicyResponse) -> list[str]:
    """Return an id for each call of a response, derived from the history and the response.

    Some agents write ids into their next prompt. Random ids would be noise for the policy, and
    a run could not be repeated.
    """
    history = [(message.role, message.content, message.calls) for message in request.messages]
    source = repr((history, response.content, response.calls)).encode()
    return [
        f"call_{blake2b(source, digest_size=_CALL_ID_BYTES, salt=number.to_bytes(2)).hexdigest()}"
        for number in range(len(response.calls))
    ]


def _normalize_json(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except _JSON_ERRORS:
        return arguments.strip()


def _tagged_call(call: FunctionCall) -> str:
    try:
        arguments: Any = json.loads(call.arguments)
    except _JSON_ERRORS:
        arguments = call.arguments
    return f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': arguments})}\n</tool_call>"
