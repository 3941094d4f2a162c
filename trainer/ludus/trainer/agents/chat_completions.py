"""`/v1/chat/completions`: a request of that form as Asked, and Said as its response or stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.trainer.agents.api_error import FieldError
from ludus.trainer.agents.exchange import Asked, ChatMessage, FunctionCall, Role, Said, call_ids
from ludus.trainer.agents.fields import (
    JsonObject,
    Known,
    flag,
    listed,
    must_call,
    num_answers,
    offered,
    role_of,
    shown,
    stops,
    text_of,
    tool_of,
    whole,
)
from ludus.trainer.models.template import ToolSpec

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_KNOWN = Known(
    honoured=frozenset(
        {
            *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "stop"),
            *("max_tokens", "max_completion_tokens", "seed", "logprobs", "top_logprobs"),
            *("stream", "stream_options"),
        }
    ),
    only_empty={
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
    """A request, and how its response is to look."""

    asked: Asked
    model: str
    is_stream: bool
    with_usage: bool
    """Whether a stream ends with the numbers of tokens."""


def read_chat_request(body: Any, model: str) -> ChatRequest:
    """The request; `model` is what it is called where the agent does not say.

    Raises:
        ApiError: a field is unknown, not honoured, or not as it should be.
    """
    given = _KNOWN.check(body)
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise FieldError("messages", f"expected a list of messages, got {shown(messages)}")
    tools = tuple(_tool(tool, f"tools.{n}") for n, tool in enumerate(listed(given, "tools")))
    if whole(given, "top_logprobs", 0):
        raise FieldError(
            "top_logprobs",
            "expected 0: log-probs are of the tokens that were sampled, not of others",
            "unsupported_parameter",
        )
    limits = [
        limit
        for name in ("max_tokens", "max_completion_tokens")
        if (limit := whole(given, name, 1)) is not None
    ]
    asked = Asked(
        messages=tuple(_message(one, f"messages.{n}") for n, one in enumerate(messages)),
        tools=offered(tools, given.get("tool_choice")),
        num=num_answers(given),
        stop=stops(given),
        max_tokens=min(limits, default=None),
        seed=whole(given, "seed", -(2**63), 2**63),
        is_one_call=not flag(given, "parallel_tool_calls", default=True),
        must_call=must_call(given.get("tool_choice")),
        with_logprobs=flag(given, "logprobs"),
    )
    return ChatRequest(
        asked,
        str(given.get("model") or model),
        flag(given, "stream"),
        _with_usage(given.get("stream_options", {})),
    )


def chat_response(request: ChatRequest, said: Sequence[Said]) -> JsonObject:
    """The response as a whole."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **_told(request, one)},
            "logprobs": _logprobs(one, request),
            "finish_reason": one.finish_reason,
        }
        for index, one in enumerate(said)
    ]
    return {**_head(request, "chat.completion"), "choices": choices, "usage": _usage(said)}


def chat_chunks(request: ChatRequest, said: Sequence[Said]) -> Iterator[JsonObject]:
    """The response in the pieces of a stream."""
    head = _head(request, "chat.completion.chunk")
    for index, one in enumerate(said):
        deltas = list(_deltas(request, one))
        for number, delta in enumerate(deltas):
            # All log-probs come with the first words: answers are sampled before they are streamed.
            logprobs = _logprobs(one, request) if number == 0 else None
            yield {**head, "choices": [_choice(index, delta, logprobs, None)]}
        yield {**head, "choices": [_choice(index, {}, None, one.finish_reason)]}
    if request.with_usage:
        yield {**head, "choices": [], "usage": _usage(said)}


def _with_usage(options: Any) -> bool:
    """Whether `stream_options` ask for the numbers of tokens."""
    if not isinstance(options, dict):
        raise FieldError("stream_options", f"expected an object, got {shown(options)}")
    for name in options.keys() - {"include_usage"}:
        raise FieldError(
            f"stream_options.{name}",
            "this endpoint does not know the field; leave it out",
            "unknown_parameter",
        )
    return flag(options, "include_usage")


def _message(message: Any, param: str) -> ChatMessage:
    role = role_of(message, _ROLES, param)
    if role == "assistant" and message.get("function_call"):
        raise FieldError(f"{param}.function_call", "expected tool_calls instead")
    calls = tuple(
        _call(call, f"{param}.tool_calls.{number}")
        for number, call in enumerate(listed(message, "tool_calls", f"{param}.tool_calls"))
    )
    content = text_of(message.get("content"), f"{param}.content")
    return ChatMessage(role, content, calls)


def _call(call: Any, param: str) -> FunctionCall:
    match call:
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            return FunctionCall(name, arguments)
        case _:
            raise FieldError(
                param, f"expected a function with name and arguments as JSON, got {shown(call)}"
            )


def _tool(tool: Any, param: str) -> ToolSpec:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise FieldError(param, f"expected a tool of type 'function', got {shown(tool)}")
    return tool_of(tool.get("function"), f"{param}.function")


def _head(request: ChatRequest, kind: str) -> JsonObject:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": None,
    }


def _told(request: ChatRequest, said: Said) -> JsonObject:
    told: JsonObject = {"content": said.content if said.content or not said.calls else None}
    if said.thought:
        told["reasoning_content"] = said.thought
    if said.calls:
        told["tool_calls"] = list(_written(request, said))
    return told


def _written(request: ChatRequest, said: Said) -> Iterator[JsonObject]:
    for call, call_id in zip(said.calls, call_ids(request.asked, said), strict=True):
        function = {"name": call.name, "arguments": call.arguments}
        yield {"id": call_id, "type": "function", "function": function}


def _deltas(request: ChatRequest, said: Said) -> Iterator[JsonObject]:
    yield {"role": "assistant", "content": "" if not said.calls else None}
    for name, text in (("reasoning_content", said.thought), ("content", said.content)):
        for begin in range(0, len(text), _CHARACTERS_PER_CHUNK):
            yield {name: text[begin : begin + _CHARACTERS_PER_CHUNK]}
    for index, written in enumerate(_written(request, said)):
        function = written["function"]
        begun = {**written, "function": {**function, "arguments": ""}}
        yield {"tool_calls": [{"index": index, **begun}]}
        rest = {"arguments": function["arguments"]}
        yield {"tool_calls": [{"index": index, "function": rest}]}


def _choice(index: int, delta: JsonObject, logprobs: Any, finish_reason: str | None) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(said: Said, request: ChatRequest) -> JsonObject | None:
    if not request.asked.with_logprobs:
        return None
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in said.tokens
    ]
    return {"content": content, "refusal": None}


def _usage(said: Sequence[Said]) -> JsonObject:
    num_prompt = max(one.num_prompt_tokens for one in said)
    num_said = sum(one.num_tokens for one in said)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_said,
        "total_tokens": num_prompt + num_said,
    }
