"""The format of `/v1/chat/completions`: from a request body to PolicyRequest, and back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.trainer.models.template import ToolSpec
from ludus.trainer.rollout.agents.endpoint.api_error import FieldError
from ludus.trainer.rollout.agents.endpoint.exchange import (
    ChatMessage,
    FunctionCall,
    PolicyRequest,
    PolicyResponse,
    Role,
    call_ids,
)
from ludus.trainer.rollout.agents.endpoint.fields import (
    FieldRules,
    JsonObject,
    choose_tools,
    quote,
    read_flag,
    read_integer,
    read_list,
    read_num_completions,
    read_role,
    read_stops,
    read_text,
    read_tool,
    requires_call,
    token_logprobs,
)

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_FIELDS = FieldRules(
    supported=frozenset(
        {
            *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "stop"),
            *("max_tokens", "max_completion_tokens", "seed", "logprobs", "top_logprobs"),
            *("stream", "stream_options"),
        }
    ),
    empty_only={
        "response_format": ({"type": "text"},),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
    },
)
_CHARACTERS_PER_CHUNK = 24


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request, and the settings of its response."""

    content: PolicyRequest
    model: str
    is_stream: bool
    with_usage: bool
    """True if a stream ends with the numbers of tokens."""


def read_chat_request(body: Any, model: str) -> ChatRequest:
    """Return the request in a body; `model` is the default name of the model.

    Raises:
        ApiError: a field is unknown, not supported or invalid.
    """
    fields = _FIELDS.check(body)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise FieldError("messages", f"expected a list of messages, got {quote(messages)}")
    tools = tuple(
        _read_function_tool(tool, f"tools.{n}") for n, tool in enumerate(read_list(fields, "tools"))
    )
    limits = [
        limit
        for name in ("max_tokens", "max_completion_tokens")
        if (limit := read_integer(fields, name, 1)) is not None
    ]
    content = PolicyRequest(
        messages=tuple(_read_message(m, f"messages.{n}") for n, m in enumerate(messages)),
        tools=choose_tools(tools, fields.get("tool_choice")),
        num=read_num_completions(fields),
        stop=read_stops(fields),
        max_tokens=min(limits, default=None),
        seed=read_integer(fields, "seed", -(2**63), 2**63),
        max_one_call=not read_flag(fields, "parallel_tool_calls", default=True),
        requires_call=requires_call(fields.get("tool_choice")),
        with_logprobs=read_flag(fields, "logprobs"),
    )
    return ChatRequest(
        content,
        str(fields.get("model") or model),
        read_flag(fields, "stream"),
        _read_with_usage(fields.get("stream_options", {})),
    )


def chat_response(request: ChatRequest, responses: Sequence[PolicyResponse]) -> JsonObject:
    """Return the complete response body."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **_message(request, response)},
            "logprobs": _logprobs(request, response),
            "finish_reason": response.finish_reason,
        }
        for index, response in enumerate(responses)
    ]
    return {**_head(request, "chat.completion"), "choices": choices, "usage": _usage(responses)}


def chat_chunks(request: ChatRequest, responses: Sequence[PolicyResponse]) -> Iterator[JsonObject]:
    """Yield the chunks of a streamed response."""
    head = _head(request, "chat.completion.chunk")
    for index, response in enumerate(responses):
        for number, delta in enumerate(_deltas(request, response)):
            # Completions are sampled before streaming, so the first chunk has all log-probs.
            logprobs = _logprobs(request, response) if number == 0 else None
            yield {**head, "choices": [_choice(index, delta, logprobs, None)]}
        yield {**head, "choices": [_choice(index, {}, None, response.finish_reason)]}
    if request.with_usage:
        yield {**head, "choices": [], "usage": _usage(responses)}


def _read_with_usage(options: Any) -> bool:
    """Return whether `stream_options` request the numbers of tokens."""
    if not isinstance(options, dict):
        raise FieldError("stream_options", f"expected an object, got {quote(options)}")
    for name in options.keys() - {"include_usage"}:
        raise FieldError(
            f"stream_options.{name}",
            "this endpoint does not support the field; remove it",
            "unknown_parameter",
        )
    return read_flag(options, "include_usage")


def _read_message(message: Any, param: str) -> ChatMessage:
    role = read_role(message, _ROLES, param)
    if role == "assistant" and message.get("function_call"):
        raise FieldError(f"{param}.function_call", "expected tool_calls instead")
    calls = tuple(
        _read_call(call, f"{param}.tool_calls.{number}")
        for number, call in enumerate(read_list(message, "tool_calls", f"{param}.tool_calls"))
    )
    content = read_text(message.get("content"), f"{param}.content")
    return ChatMessage(role, content, calls)


def _read_call(call: Any, param: str) -> FunctionCall:
    match call:
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            return FunctionCall(name, arguments)
        case _:
            raise FieldError(
                param, f"expected a function with name and arguments as JSON, got {quote(call)}"
            )


def _read_function_tool(tool: Any, param: str) -> ToolSpec:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise FieldError(param, f"expected a tool of type 'function', got {quote(tool)}")
    return read_tool(tool.get("function"), f"{param}.function")


def _head(request: ChatRequest, kind: str) -> JsonObject:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": None,
    }


def _message(request: ChatRequest, response: PolicyResponse) -> JsonObject:
    content = response.content if response.content or not response.calls else None
    message: JsonObject = {"content": content}
    if response.reasoning:
        message["reasoning_content"] = response.reasoning
    if response.calls:
        message["tool_calls"] = list(_tool_calls(request, response))
    return message


def _tool_calls(request: ChatRequest, response: PolicyResponse) -> Iterator[JsonObject]:
    ids = call_ids(request.content, response)
    for call, call_id in zip(response.calls, ids, strict=True):
        function = {"name": call.name, "arguments": call.arguments}
        yield {"id": call_id, "type": "function", "function": function}


def _deltas(request: ChatRequest, response: PolicyResponse) -> Iterator[JsonObject]:
    yield {"role": "assistant", "content": "" if not response.calls else None}
    texts = (("reasoning_content", response.reasoning), ("content", response.content))
    for name, text in texts:
        for start in range(0, len(text), _CHARACTERS_PER_CHUNK):
            yield {name: text[start : start + _CHARACTERS_PER_CHUNK]}
    for index, call in enumerate(_tool_calls(request, response)):
        function = call["function"]
        header = {**call, "function": {**function, "arguments": ""}}
        yield {"tool_calls": [{"index": index, **header}]}
        arguments = {"arguments": function["arguments"]}
        yield {"tool_calls": [{"index": index, "function": arguments}]}


def _choice(index: int, delta: JsonObject, logprobs: Any, finish_reason: str | None) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(request: ChatRequest, response: PolicyResponse) -> JsonObject | None:
    if not request.content.with_logprobs:
        return None
    return {"content": token_logprobs(response.tokens), "refusal": None}


def _usage(responses: Sequence[PolicyResponse]) -> JsonObject:
    num_prompt = max(response.num_prompt_tokens for response in responses)
    num_sampled = sum(response.num_tokens for response in responses)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
