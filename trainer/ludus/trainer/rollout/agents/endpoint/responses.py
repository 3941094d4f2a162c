"""The format of `/v1/responses`: from a request body to PolicyRequest, and back.

instructions, input items --> messages      a message and the calls after it become one message
a PolicyResponse          --> output items  reasoning, message, function_call
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from ludus.trainer.rollout.agents.endpoint.exchange import (
    ApiError,
    ChatMessage,
    FieldError,
    FunctionCall,
    PolicyRequest,
    PolicyResponse,
    make_call_ids,
)
from ludus.trainer.rollout.agents.endpoint.fields import (
    ApiRequest,
    JsonObject,
    check_fields,
    make_request,
    make_token_logprobs,
    quote,
    read_call,
    read_integer,
    read_list,
    read_message,
    read_text,
)

_SUPPORTED_FIELDS = (
    *("model", "input", "instructions", "previous_response_id", "tools", "tool_choice"),
    *("parallel_tool_calls", "max_output_tokens", "stream", "include", "top_logprobs"),
)
_EMPTY_VALUES = {
    "text": ({"format": {"type": "text"}}, {}),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "background": (False,),
    "stream_options": ({},),
    "prompt": (),
    "conversation": (),
    "max_tool_calls": (),
}
_IGNORED_SUBFIELDS = {
    "text": ("verbosity",),
    "reasoning": ("effort", "summary", "generate_summary"),
}
"""Fields within fields that the endpoint ignores."""
_LOGPROBS_OPTION = "message.output_text.logprobs"
_INCLUDE_OPTIONS = (_LOGPROBS_OPTION, "reasoning.encrypted_content")

ConversationsById = Mapping[str, tuple[ChatMessage, ...]]
"""Conversation up to and including each response, without instructions, by response id."""


def read_responses_request(body: Any, model: str, conversations: ConversationsById) -> ApiRequest:
    """Return the request in a body. `model` is the name of the model if the body has none."""
    fields = check_fields(_remove_ignored_subfields(body), _SUPPORTED_FIELDS, _EMPTY_VALUES)
    previous_id = fields.get("previous_response_id")
    history: tuple[ChatMessage, ...] = ()
    if previous_id is not None:
        if not isinstance(previous_id, str) or previous_id not in conversations:
            raise ApiError(
                f"previous_response_id: no response {quote(previous_id)} in this episode",
                status=404,
                param="previous_response_id",
                code="previous_response_not_found",
            )
        history = conversations[previous_id]
    if instructions := fields.get("instructions"):
        history = (ChatMessage("system", read_text(instructions, "instructions")), *history)
    messages = (*history, *_read_items(fields.get("input")))
    if not messages:
        raise FieldError("input", "expected a text or a list of items, got none")
    return make_request(
        fields,
        model,
        messages,
        max_tokens=read_integer(fields, "max_output_tokens", 1),
        needs_logprobs=_LOGPROBS_OPTION in _read_include(fields),
    )


def extend_conversation(request: ApiRequest, response: PolicyResponse) -> tuple[ChatMessage, ...]:
    """Return the conversation with the response added.

    Instructions are left out, because they apply to one request only.
    """
    messages = request.policy_request.messages[1 if request.fields.get("instructions") else 0 :]
    return (*messages, response.chat_message)


def make_response_body(request: ApiRequest, response: PolicyResponse) -> JsonObject:
    """Return the complete response body."""
    is_cut = response.finish_reason == "length"
    fields = request.fields
    instructions = fields.get("instructions")
    return {
        "id": _make_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "instructions": instructions if isinstance(instructions, str) else None,
        "max_output_tokens": request.policy_request.max_tokens,
        "metadata": {},
        "model": request.model,
        "parallel_tool_calls": not request.policy_request.is_limited_to_one_call,
        "previous_response_id": fields.get("previous_response_id"),
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": fields.get("tools", []),
        "truncation": "disabled",
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": list(_make_output_items(request.policy_request, response)),
        "usage": {
            "input_tokens": response.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": response.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": response.num_prompt_tokens + response.num_tokens,
        },
    }


def make_response_events(body: JsonObject) -> Iterator[JsonObject]:
    """Yield the events of a stream whose complete response is `body`."""
    sequence_numbers = count()

    def make_event(event_type: str, **fields: Any) -> JsonObject:
        return {"type": event_type, "sequence_number": next(sequence_numbers), **fields}

    empty_fields: JsonObject = {"output": [], "usage": None, "incomplete_details": None}
    started_response = {**body, "status": "in_progress", **empty_fields}
    yield make_event("response.created", response=started_response)
    yield make_event("response.in_progress", response=started_response)
    for index, item in enumerate(body["output"]):
        unfinished_item = {**item, "status": "in_progress"}
        for name in ("content", "summary"):
            if name in item:
                unfinished_item[name] = []
        if "arguments" in item:
            unfinished_item["arguments"] = ""
        yield make_event("response.output_item.added", output_index=index, item=unfinished_item)
        for event_type, fields in _make_item_events(item):
            yield make_event(event_type, output_index=index, item_id=item["id"], **fields)
        yield make_event("response.output_item.done", output_index=index, item=item)
    yield make_event(f"response.{body['status']}", response=body)


def _remove_ignored_subfields(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    fields = dict(body)
    for name, subfields in _IGNORED_SUBFIELDS.items():
        if isinstance(fields.get(name), dict):
            fields[name] = {
                subfield: subfield_value
                for subfield, subfield_value in fields[name].items()
                if subfield not in subfields and subfield_value
            }
    return fields


def _read_include(fields: JsonObject) -> list[Any]:
    options = read_list(fields, "include")
    for option in options:
        if option not in _INCLUDE_OPTIONS:
            raise FieldError(
                "include", f"expected some of {list(_INCLUDE_OPTIONS)}, got {quote(option)}"
            )
    return options


def _read_items(items: Any) -> list[ChatMessage]:
    if isinstance(items, str):
        return [ChatMessage("user", items)]
    if items is not None and not isinstance(items, list):
        raise FieldError("input", f"expected a text or a list of items, got {quote(items)}")
    messages: list[ChatMessage] = []
    calls_by_index: defaultdict[int, list[FunctionCall]] = defaultdict(list)
    for item_index, item in enumerate(items or ()):
        param = f"input.{item_index}"
        match item.get("type", "message") if isinstance(item, dict) else item:
            case "reasoning":
                continue
            case "function_call":
                if not messages or messages[-1].role != "assistant":
                    messages.append(ChatMessage("assistant", ""))
                calls_by_index[len(messages) - 1].append(read_call(item, param))
            case "function_call_output":
                text = read_text(item.get("output"), f"{param}.output")
                messages.append(ChatMessage("tool", text))
            case "message":
                messages.append(read_message(item, param))
            case item_type:
                raise FieldError(
                    param,
                    "expected a message, function_call, function_call_output or reasoning, got "
                    f"{quote(item_type)}",
                    "unsupported_content",
                )
    for index, calls in calls_by_index.items():
        messages[index] = replace(messages[index], calls=tuple(calls))
    return messages


def _make_output_items(request: PolicyRequest, response: PolicyResponse) -> Iterator[JsonObject]:
    if response.reasoning:
        summary = [{"type": "summary_text", "text": response.reasoning}]
        item_id = _make_id("rs")
        yield {"type": "reasoning", "id": item_id, "status": "completed", "summary": summary}
    if response.content or not response.calls:
        content_part = {
            "type": "output_text",
            "text": response.content,
            "annotations": [],
            "logprobs": make_token_logprobs(response),
        }
        yield {
            "type": "message",
            "id": _make_id("msg"),
            "role": "assistant",
            "status": "incomplete" if response.finish_reason == "length" else "completed",
            "content": [content_part],
        }
    for call, call_id in zip(response.calls, make_call_ids(request, response), strict=True):
        yield {
            "type": "function_call",
            "id": _make_id("fc"),
            "call_id": call_id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }


def _make_item_events(item: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """Yield the events between the start and the end of an item."""
    match item:
        case {"type": "message", "content": content}:
            for part_index, part in enumerate(content):
                index_fields = {"content_index": part_index}
                empty_part = {**part, "text": "", "logprobs": []}
                yield "response.content_part.added", {**index_fields, "part": empty_part}
                text_fields = {**index_fields, "logprobs": part["logprobs"]}
                yield "response.output_text.delta", {**text_fields, "delta": part["text"]}
                yield "response.output_text.done", {**text_fields, "text": part["text"]}
                yield "response.content_part.done", {**index_fields, "part": part}
        case {"type": "function_call", "arguments": arguments, "name": name}:
            yield "response.function_call_arguments.delta", {"delta": arguments}
            yield "response.function_call_arguments.done", {"arguments": arguments, "name": name}


def _make_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
