"""The format of `/v1/responses`: from a request body to PolicyRequest, and back.

instructions, input items --> messages      a message and the calls after it are one message
a PolicyResponse          --> output items  reasoning, message, function_call
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from ludus.trainer.models.template import ToolSpec
from ludus.trainer.rollout.agents.endpoint.api_error import ApiError, FieldError
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
    read_role,
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
}
_LOGPROBS_OPTION = "message.output_text.logprobs"
_FIELDS = FieldRules(
    supported=frozenset(
        {
            *("model", "input", "instructions", "previous_response_id", "tools", "tool_choice"),
            *("parallel_tool_calls", "max_output_tokens", "stream", "include", "top_logprobs"),
        }
    ),
    empty_only={
        "text": ({"format": {"type": "text"}}, {}),
        "reasoning": ({},),
        "truncation": ("disabled",),
        "background": (False,),
        "stream_options": ({},),
        "prompt": (),
        "conversation": (),
        "max_tool_calls": (),
    },
)
_INCLUDE_OPTIONS = (_LOGPROBS_OPTION, "reasoning.encrypted_content")


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request, and the settings of its response."""

    content: PolicyRequest
    model: str
    is_stream: bool
    instructions: str | None
    previous_id: str | None
    tools: list[JsonObject]
    """Tools as the agent sent them."""


ConversationsById = Mapping[str, tuple[ChatMessage, ...]]
"""Conversation up to and including a response, without instructions, by the response's id."""


def read_responses_request(
    body: Any, model: str, conversations: ConversationsById
) -> ResponsesRequest:
    """Return the request in a body; `model` is the default name of the model.

    Raises:
        ApiError: a field is unknown, not supported or invalid.
    """
    fields = _FIELDS.check(_without_preferences(body))
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
    instructions = fields.get("instructions")
    if instructions:
        history = (ChatMessage("system", read_text(instructions, "instructions")), *history)
    tools = tuple(
        _read_flat_tool(tool, f"tools.{n}") for n, tool in enumerate(read_list(fields, "tools"))
    )
    messages = (*history, *_read_messages(fields.get("input")))
    if not messages:
        raise FieldError("input", "expected a text or a list of items, got none")
    return ResponsesRequest(
        PolicyRequest(
            messages=messages,
            tools=choose_tools(tools, fields.get("tool_choice")),
            max_tokens=read_integer(fields, "max_output_tokens", 1),
            max_one_call=not read_flag(fields, "parallel_tool_calls", default=True),
            requires_call=requires_call(fields.get("tool_choice")),
            with_logprobs=_LOGPROBS_OPTION in _read_include(fields),
        ),
        str(fields.get("model") or model),
        read_flag(fields, "stream"),
        instructions if isinstance(instructions, str) else None,
        previous_id,
        read_list(fields, "tools"),
    )


def conversation_after(
    request: ResponsesRequest, response: PolicyResponse
) -> tuple[ChatMessage, ...]:
    """Return the conversation with the response, without instructions, which apply only once."""
    messages = request.content.messages[1 if request.instructions else 0 :]
    return (*messages, response.as_message)


def response_body(request: ResponsesRequest, response: PolicyResponse) -> JsonObject:
    """Return the complete response body."""
    is_cut = response.finish_reason == "length"
    return {
        "id": _make_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "instructions": request.instructions,
        "max_output_tokens": request.content.max_tokens,
        "metadata": {},
        "model": request.model,
        "parallel_tool_calls": not request.content.max_one_call,
        "previous_response_id": request.previous_id,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": request.tools,
        "truncation": "disabled",
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": list(_output_items(request.content, response)),
        "usage": {
            "input_tokens": response.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": response.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": response.num_prompt_tokens + response.num_tokens,
        },
    }


def response_events(body: JsonObject) -> Iterator[JsonObject]:
    """Yield the events of a stream whose complete response is `body`."""
    numbers = count()

    def event(kind: str, **fields: Any) -> JsonObject:
        return {"type": kind, "sequence_number": next(numbers), **fields}

    empty: JsonObject = {"output": [], "usage": None, "incomplete_details": None}
    started_response = {**body, "status": "in_progress", **empty}
    yield event("response.created", response=started_response)
    yield event("response.in_progress", response=started_response)
    for index, item in enumerate(body["output"]):
        unfinished_item = {**item, "status": "in_progress"}
        for name in ("content", "summary"):
            if name in item:
                unfinished_item[name] = []
        if "arguments" in item:
            unfinished_item["arguments"] = ""
        yield event("response.output_item.added", output_index=index, item=unfinished_item)
        for kind, fields in _item_events(item):
            yield event(kind, output_index=index, item_id=item["id"], **fields)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{body['status']}", response=body)


def _without_preferences(body: Any) -> Any:
    """Return the request without preferences about the text and the reasoning.

    The endpoint ignores the length of the text, the reasoning effort and its summary.
    """
    if not isinstance(body, dict):
        return body
    fields = dict(body)
    if isinstance(fields.get("text"), dict):
        fields["text"] = {k: v for k, v in fields["text"].items() if k != "verbosity" and v}
    if isinstance(fields.get("reasoning"), dict):
        ignored_fields = ("effort", "summary", "generate_summary")
        reasoning = fields["reasoning"]
        fields["reasoning"] = {k: v for k, v in reasoning.items() if k not in ignored_fields and v}
    return fields


def _read_include(fields: JsonObject) -> list[Any]:
    options = read_list(fields, "include")
    unknown_options = [option for option in options if option not in _INCLUDE_OPTIONS]
    if unknown_options:
        raise FieldError(
            "include", f"expected some of {list(_INCLUDE_OPTIONS)}, got {quote(unknown_options[0])}"
        )
    return options


def _read_messages(value: Any) -> list[ChatMessage]:
    if isinstance(value, str):
        return [ChatMessage("user", value)]
    if value is None:
        return []
    if not isinstance(value, list):
        raise FieldError("input", f"expected a text or a list of items, got {quote(value)}")
    messages: list[ChatMessage] = []
    can_take_calls = False
    for number, item in enumerate(value):
        param = f"input.{number}"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":
            continue
        if kind == "function_call":
            call = _read_call(item, param)
            if can_take_calls:
                messages[-1] = replace(messages[-1], calls=(*messages[-1].calls, call))
            else:
                messages.append(ChatMessage("assistant", "", (call,)))
            can_take_calls = True
            continue
        messages.append(_read_message(kind, item, param))
        can_take_calls = messages[-1].role == "assistant"
    return messages


def _read_message(kind: Any, item: Any, param: str) -> ChatMessage:
    if kind == "function_call_output":
        return ChatMessage("tool", read_text(item.get("output"), f"{param}.output"))
    if kind != "message":
        raise FieldError(
            param,
            "expected a message, function_call, function_call_output or reasoning, got "
            f"{quote(kind or item)}",
            "unsupported_content",
        )
    role = read_role(item, _ROLES, param)
    return ChatMessage(role, read_text(item.get("content"), f"{param}.content"))


def _read_call(item: JsonObject, param: str) -> FunctionCall:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise FieldError(param, f"expected name and arguments as JSON, got {quote(item)}")
    return FunctionCall(name, arguments)


def _read_flat_tool(tool: Any, param: str) -> ToolSpec:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise FieldError(param, f"expected a tool of type 'function', got {quote(tool)}")
    return read_tool(tool, param)


def _output_items(request: PolicyRequest, response: PolicyResponse) -> Iterator[JsonObject]:
    if response.reasoning:
        summary = [{"type": "summary_text", "text": response.reasoning}]
        item_id = _make_id("rs")
        yield {"type": "reasoning", "id": item_id, "status": "completed", "summary": summary}
    if response.content or not response.calls:
        part = {
            "type": "output_text",
            "text": response.content,
            "annotations": [],
            "logprobs": token_logprobs(response.tokens),
        }
        yield {
            "type": "message",
            "id": _make_id("msg"),
            "role": "assistant",
            "status": "incomplete" if response.finish_reason == "length" else "completed",
            "content": [part],
        }
    for call, call_id in zip(response.calls, call_ids(request, response), strict=True):
        yield {
            "type": "function_call",
            "id": _make_id("fc"),
            "call_id": call_id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }


def _item_events(item: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """Yield the events between the start and the end of an item."""
    match item:
        case {"type": "message", "content": content}:
            for number, part in enumerate(content):
                index = {"content_index": number}
                empty = {**part, "text": "", "logprobs": []}
                yield "response.content_part.added", {**index, "part": empty}
                text_fields = {**index, "logprobs": part["logprobs"]}
                yield "response.output_text.delta", {**text_fields, "delta": part["text"]}
                yield "response.output_text.done", {**text_fields, "text": part["text"]}
                yield "response.content_part.done", {**index, "part": part}
        case {"type": "function_call", "arguments": arguments, "name": name}:
            yield "response.function_call_arguments.delta", {"delta": arguments}
            yield "response.function_call_arguments.done", {"arguments": arguments, "name": name}


def _make_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
