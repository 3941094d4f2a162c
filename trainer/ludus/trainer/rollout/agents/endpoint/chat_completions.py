"""The format of `/v1/chat/completions`: from a request body to PolicyRequest, and back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ludus.trainer.rollout.agents.endpoint.exchange import (
    ChatMessage,
    FieldError,
    PolicyResponse,
    call_ids,
)
from ludus.trainer.rollout.agents.endpoint.fields import (
    ApiRequest,
    JsonObject,
    check_fields,
    make_request,
    quote,
    read_call,
    read_flag,
    read_integer,
    read_list,
    read_message,
    token_logprobs,
    unknown_field_error,
)

_SUPPORTED = (
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "stop"),
    *("max_tokens", "max_completion_tokens", "seed", "logprobs", "top_logprobs"),
    *("stream", "stream_options"),
)
_EMPTY_ONLY = {
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
_CHARACTERS_PER_CHUNK = 24


def read_chat_request(body: Any, model: str) -> ApiRequest:
    """Return the request in a body; `model` is the default name of the model."""
    fields = check_fields(body, _SUPPORTED, _EMPTY_ONLY)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise FieldError("messages", f"expected a list of messages, got {quote(messages)}")
    _check_stream_options(fields.get("stream_options", {}))
    limits = [
        limit
        for name in ("max_tokens", "max_completion_tokens")
        if (limit := read_integer(fields, name, 1)) is not None
    ]
    return make_request(
        fields,
        model,
        [_read_message_and_calls(message, f"messages.{n}") for n, message in enumerate(messages)],
        max_tokens=min(limits, default=None),
        with_logprobs=read_flag(fields, "logprobs"),
    )


def chat_response(request: ApiRequest, responses: Sequence[PolicyResponse]) -> JsonObject:
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


def chat_chunks(request: ApiRequest, responses: Sequence[PolicyResponse]) -> Iterator[JsonObject]:
    """Yield the chunks of a streamed response."""
    head = _head(request, "chat.completion.chunk")
    for index, response in enumerate(responses):
        for number, delta in enumerate(_deltas(request, response)):
            # Completions are sampled before streaming, so the first chunk has all log-probs.
            logprobs = _logprobs(request, response) if number == 0 else None
            yield {**head, "choices": [_choice(index, delta, logprobs, None)]}
        yield {**head, "choices": [_choice(index, {}, None, response.finish_reason)]}
    if request.fields.get("stream_options", {}).get("include_usage"):
        yield {**head, "choices": [], "usage": _usage(responses)}


def _check_stream_options(options: Any) -> None:
    if not isinstance(options, dict):
        raise FieldError("stream_options", f"expected an object, got {quote(options)}")
    for name in options.keys() - {"include_usage"}:
        raise unknown_field_error(f"stream_options.{name}")
    read_flag(options, "include_usage")


def _read_message_and_calls(source: Any, param: str) -> ChatMessage:
    message = read_message(source, param)
    if message.role == "assistant" and source.get("function_call"):
        raise FieldError(f"{param}.function_call", "expected tool_calls instead")
    calls = read_list(source, "tool_calls", f"{param}.tool_calls")
    return replace(
        message,
        calls=tuple(read_call(call, f"{param}.tool_calls.{n}") for n, call in enumerate(calls)),
    )


def _head(request: ApiRequest, kind: str) -> JsonObject:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": None,
    }


def _message(request: ApiRequest, response: PolicyResponse) -> JsonObject:
    content = response.content if response.content or not response.calls else None
    message: JsonObject = {"content": content}
    if response.reasoning:
        message["reasoning_content"] = response.reasoning
    if response.calls:
        message["tool_calls"] = list(_tool_calls(request, response))
    return message


def _tool_calls(request: ApiRequest, response: PolicyResponse) -> Iterator[JsonObject]:
    ids = call_ids(request.content, response)
    for call, call_id in zip(response.calls, ids, strict=True):
        function = {"name": call.name, "arguments": call.arguments}
        yield {"id": call_id, "type": "function", "function": function}


def _deltas(request: ApiRequest, response: PolicyResponse) -> Iterator[JsonObject]:
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


def _logprobs(request: ApiRequest, response: PolicyResponse) -> JsonObject | None:
    if not request.content.with_logprobs:
        return None
    return {"content": token_logprobs(response), "refusal": None}


def _usage(responses: Sequence[PolicyResponse]) -> JsonObject:
    num_prompt = max(response.num_prompt_tokens for response in responses)
    num_sampled = sum(response.num_tokens for response in responses)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
