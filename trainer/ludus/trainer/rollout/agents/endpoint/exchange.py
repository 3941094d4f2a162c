"""Requests of an agent and the policy's responses, independent of OpenAI's two API formats.

/v1/chat/completions --+                                +--> ConversationTree     the policy
                       +--> PolicyRequest --Responder---+
/v1/responses ---------+    <--- PolicyResponse         +--> RandomResponder      warm start
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, Protocol, TypeAlias

from ludus.env import Message
from ludus.env.text.unicode import format_json
from ludus.proto.errors import LudusError
from ludus.trainer.models.messages import AssistantMessage, CallEntry
from ludus.trainer.models.tool_calls import ToolSpec

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

MessageKey: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""Identifier of a completion: its text, and the names and arguments of its calls."""

_JSON_ERRORS = (ValueError, RecursionError)
"""Exceptions that `json.loads` raises for invalid or too deeply nested JSON."""
_CALL_ID_BYTES = 4
"""Number of hash bytes in a call id; few, because ids can be part of prompts."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of one of the agent's tools."""

    name: str
    arguments: str
    """Arguments as JSON."""
    model_id: str = field(default="", compare=False, repr=False)
    """Id that the model gave the call; empty in most forms. The agent sees another id."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message in an agent's history."""

    role: Role
    content: str
    calls: tuple[FunctionCall, ...] = ()

    @property
    def key(self) -> MessageKey:
        """Key of the message, equal for a response and an agent's repetition of it.

        Text is stripped and JSON is normalized, because clients change both.
        """
        calls = tuple((call.name, _normalize_json(call.arguments)) for call in self.calls)
        return self.content.strip(), calls

    @property
    def text(self) -> str:
        """Text of the message, followed by its calls in <tool_call> tags."""
        return "\n".join(filter(None, [self.content, *map(_format_call, self.calls)]))

    @property
    def unparsed_texts(self) -> Iterator[str]:
        """The content, and the names and arguments of the calls as they were sent."""
        yield self.content
        for call in self.calls:
            yield call.name
            yield call.arguments

    @property
    def template_message(self) -> Message:
        """Message with its calls in its text."""
        return {"role": self.role, "content": self.text}

    @property
    def structured_message(self) -> Message:
        """Message with its calls in a separate field, for templates that render calls."""
        calls: list[CallEntry] = []
        for call in self.calls:
            arguments = _load_arguments(call)
            if not isinstance(arguments, dict):
                return self.template_message
            entry: CallEntry = {"name": call.name, "arguments": arguments}
            calls.append({**entry, "id": call.model_id} if call.model_id else entry)
        if not calls:
            return self.template_message
        message: AssistantMessage = {"role": self.role, "content": self.content, "calls": calls}
        return message


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """A request for completions of the policy."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    """Tools that a completion may call."""
    num_completions: int = 1
    stop_texts: tuple[str, ...] = ()
    """Texts that end a completion. The response does not contain them."""
    max_tokens: int | None = None
    seed: int | None = None
    is_limited_to_one_call: bool = False
    """True if a completion may contain at most one call."""
    requires_call: bool = False
    """True if the agent requires a call. The policy is not forced to make one."""
    needs_logprobs: bool = False
    """True if the response must contain tokens and log-probs."""


@dataclass(frozen=True, slots=True)
class PolicyResponse:
    """A completion in the form that the agent receives."""

    content: str
    reasoning: str = ""
    """Reasoning at the start of the completion."""
    calls: tuple[FunctionCall, ...] = ()
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Number of sampled tokens that remain after the completion was cut."""
    tokens: Sequence[tuple[str, float]] = ()
    """Text and log-prob of each sampled token; empty if they were not requested."""

    @property
    def chat_message(self) -> ChatMessage:
        """Response as a message of the agent's history."""
        return ChatMessage("assistant", self.content, self.calls)


class ApiError(LudusError):
    """The error that an agent receives if its request cannot be served.

    OpenAI's clients automatically retry after status 408, 409, 429 and 5xx. An error that a retry
    would cause again must have a different status.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.error_type = error_type
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """Body of the HTTP response."""
        fields = {"message": self.message, "type": self.error_type, "param": self.param}
        return {"error": {**fields, "code": self.code}}


class LimitError(ApiError):
    """A limit of the run leaves no room for the completion. The episode ends as truncated."""


class FieldError(ApiError):
    """A field of a request has an invalid value."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(f"{param}: {message}", param=param, code=code)


class Responder(Protocol):
    """A component that responds to the requests of one agent."""

    async def respond(self, request: PolicyRequest) -> list[PolicyResponse]:
        """Return [request.num_completions] responses.

        Raises:
            ApiError: the request cannot be served; the agent receives the error.
        """

    def check_body_size(self, num_bytes: int) -> None:
        """Check the size of a request's body, before the body is read.

        Raises:
            LimitError: no prompt within the run's limits needs so large a body.
        """


def make_call_ids(request: PolicyRequest, response: PolicyResponse) -> list[str]:
    """Return an id for each call of a response, derived from the history and the response.

    The ids are not random, because some agents write them into their next prompt: random ids would
    be noise for the policy and make runs irreproducible.
    """
    history = [(message.role, message.content, message.calls) for message in request.messages]
    id_source = repr((history, response.content, response.calls)).encode()
    return [
        f"call_{blake2b(id_source, digest_size=_CALL_ID_BYTES, salt=index.to_bytes(2)).hexdigest()}"
        for index in range(len(response.calls))
    ]


def _normalize_json(json_text: str) -> str:
    try:
        return json.dumps(json.loads(json_text), sort_keys=True)
    except _JSON_ERRORS:
        return json_text.strip()


def _load_arguments(call: FunctionCall) -> Any:
    try:
        return json.loads(call.arguments)
    except _JSON_ERRORS:
        return call.arguments


def _format_call(call: FunctionCall) -> str:
    fields = {"name": call.name, "arguments": _load_arguments(call)}
    return f"<tool_call>\n{format_json(fields)}\n</tool_call>"
