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
    make_call_ids,
)
from ludus.trainer.rollout.agents.endpoint.fields import (
    ApiRequest,
    JsonObject,
    check_fields,
    make_request,
    make_token_logprobs,
    make_unknown_field_error,
    quote,
    read_call,
    read_flag,
    read_integer,
    read_list,
    read_message,
)

_SUPPORTED_FIELDS = (
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "stop"),
    *("max_tokens", "max_completion_tokens", "seed", "logprobs", "top_logprobs"),
    *("stream", "stream_options"),
)
_EMPTY_VALUES = {
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
    """Return the request in a body. `model` is the name of the model if the body has none."""
    fields = check_fields(body, _SUPPORTED_FIELDS, _EMPTY_VALUES)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise FieldError("messages", f"expected a list of messages, got {quote(messages)}")
    _check_stream_options(fields.get("stream_options", {}))
    limits = [read_integer(fields, name, 1) for name in ("max_tokens", "max_completion_tokens")]
    return make_request(
        fields,
        model,
        [
            _read_message_and_calls(message, f"messages.{index}")
            for index, message in enumerate(messages)
        ],
        max_tokens=min(filter(None, limits), default=None),
        needs_logprobs=read_flag(fields, "logprobs"),
    )


def make_chat_response(request: ApiRequest, responses: Sequence[PolicyResponse]) -> JsonObject:
    """Return the complete response body."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **_make_message(request, response)},
            "logprobs": _make_logprobs(request, response),
            "finish_reason": response.finish_reason,
        }
        for index, response in enumerate(responses)
    ]
    return {
        **_make_common_fields(request, "chat.completion"),
        "choices": choices,
        "usage": _make_usage(responses),
    }


def make_chat_chunks(
    request: ApiRequest, responses: Sequence[PolicyResponse]
) -> Iterator[JsonObject]:
    """Yield the chunks of a streamed response."""
    common_fields = _make_common_fields(request, "chat.completion.chunk")
    for index, response in enumerate(responses):
        for delta_index, delta in enumerate(_make_deltas(request, response)):
            # The completion is already sampled, so the first chunk contains all log-probs.
            logprobs = _make_logprobs(request, response) if delta_index == 0 else None
            yield {**common_fields, "choices": [_make_choice(index, delta, logprobs, None)]}
        yield {**common_fields, "choices": [_make_choice(index, {}, None, response.finish_reason)]}
    if request.fields.get("stream_options", {}).get("include_usage"):
        yield {**common_fields, "choices": [], "usage": _make_usage(responses)}


def _check_stream_options(options: Any) -> None:
    if not isinstance(options, dict):
        raise FieldError("stream_options", f"expected an object, got {quote(options)}")
    for name in options.keys() - {"include_usage"}:
        raise make_unknown_field_error(f"stream_options.{name}")
    read_flag(options, "include_usage")


def _read_message_and_calls(message_json: Any, param: str) -> ChatMessage:
    message = read_message(message_json, param)
    if message.role == "assistant" and message_json.get("function_call"):
        raise FieldError(f"{param}.function_call", "expected tool_calls instead")
    calls_param = f"{param}.tool_calls"
    entries = enumerate(read_list(message_json, "tool_calls", calls_param))
    calls = tuple(read_call(call, f"{calls_param}.{index}") for index, call in entries)
    return replace(message, calls=calls) if calls else message


def _make_common_fields(request: ApiRequest, object_type: str) -> JsonObject:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": object_type,
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": None,
    }


def _make_message(request: ApiRequest, response: PolicyResponse) -> JsonObject:
    content = response.content if response.content or not response.calls else None
    message: JsonObject = {"content": content}
    if response.reasoning:
        message["reasoning_content"] = response.reasoning
    if response.calls:
        message["tool_calls"] = list(_make_tool_calls(request, response))
    return message


def _make_tool_calls(request: ApiRequest, response: PolicyResponse) -> Iterator[JsonObject]:
    call_ids = make_call_ids(request.policy_request, response)
    for call, call_id in zip(response.calls, call_ids, strict=True):
        function = {"name": call.name, "arguments": call.arguments}
        yield {"id": call_id, "type": "function", "function": function}


def _make_deltas(request: ApiRequest, response: PolicyResponse) -> Iterator[JsonObject]:
    yield {"role": "assistant", "content": "" if not response.calls else None}
    texts = (("reasoning_content", response.reasoning), ("content", response.content))
    for name, text in texts:
        for start in range(0, len(text), _CHARACTERS_PER_CHUNK):
            yield {name: text[start : start + _CHARACTERS_PER_CHUNK]}
    for index, call in enumerate(_make_tool_calls(request, response)):
        function = call["function"]
        call_start = {**call, "function": {**function, "arguments": ""}}
        yield {"tool_calls": [{"index": index, **call_start}]}
        arguments = {"arguments": function["arguments"]}
        yield {"tool_calls": [{"index": index, "function": arguments}]}


def _make_choice(
    index: int, delta: JsonObject, logprobs: Any, finish_reason: str | None
) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _make_logprobs(request: ApiRequest, response: PolicyResponse) -> JsonObject | None:
    if not request.policy_request.needs_logprobs:
        return None
    return {"content": make_token_logprobs(response), "refusal": None}


def _make_usage(responses: Sequence[PolicyResponse]) -> JsonObject:
    num_prompt_tokens = max(response.num_prompt_tokens for response in responses)
    num_sampled_tokens = sum(response.num_tokens for response in responses)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled_tokens,
        "total_tokens": num_prompt_tokens + num_sampled_tokens,
    }
