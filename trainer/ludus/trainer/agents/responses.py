"""`/v1/responses`: a request of that form as Asked, and Said as its response or events.

instructions, input items --> messages      a message and the calls after it are one answer
an answer                 --> output items  reasoning, message, function_call
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from ludus.trainer.agents.api_error import ApiError, FieldError
from ludus.trainer.agents.exchange import Asked, ChatMessage, FunctionCall, Role, Said, call_ids
from ludus.trainer.agents.fields import (
    JsonObject,
    Known,
    flag,
    listed,
    must_call,
    offered,
    role_of,
    shown,
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
}
_WITH_LOGPROBS = "message.output_text.logprobs"
_KNOWN = Known(
    honoured=frozenset(
        {
            *("model", "input", "instructions", "previous_response_id", "tools", "tool_choice"),
            *("parallel_tool_calls", "max_output_tokens", "stream", "include", "top_logprobs"),
        }
    ),
    only_empty={
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
_INCLUDED = (_WITH_LOGPROBS, "reasoning.encrypted_content")


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request, and how its response is to look."""

    asked: Asked
    model: str
    is_stream: bool
    instructions: str | None
    previous_id: str | None
    tools: list[JsonObject]
    """As they came."""


Conversations = Mapping[str, tuple[ChatMessage, ...]]
"""What was said up to a response and with it, without instructions, by the response's id."""


def read_responses_request(body: Any, model: str, earlier: Conversations) -> ResponsesRequest:
    """The request; `model` is what it is called where the agent does not say.

    Raises:
        ApiError: a field is unknown, not honoured, or not as it should be.
    """
    given = _with_plain_options(body)
    given = _KNOWN.check(given)
    previous_id = given.get("previous_response_id")
    before: tuple[ChatMessage, ...] = ()
    if previous_id is not None:
        if not isinstance(previous_id, str) or previous_id not in earlier:
            raise ApiError(
                f"previous_response_id: no response {shown(previous_id)} in this episode",
                status=404,
                param="previous_response_id",
                code="previous_response_not_found",
            )
        before = earlier[previous_id]
    instructions = given.get("instructions")
    head = (ChatMessage("system", text_of(instructions, "instructions")),) if instructions else ()
    tools = tuple(_tool(tool, f"tools.{n}") for n, tool in enumerate(listed(given, "tools")))
    if whole(given, "top_logprobs", 0):
        raise FieldError(
            "top_logprobs",
            "expected 0: log-probs are of the tokens that were sampled, not of others",
            "unsupported_parameter",
        )
    messages = (*head, *before, *_messages(given.get("input")))
    if not messages:
        raise FieldError("input", "expected a text or a list of items, got none")
    return ResponsesRequest(
        Asked(
            messages=messages,
            tools=offered(tools, given.get("tool_choice")),
            max_tokens=whole(given, "max_output_tokens", 1),
            is_one_call=not flag(given, "parallel_tool_calls", default=True),
            must_call=must_call(given.get("tool_choice")),
            with_logprobs=_WITH_LOGPROBS in _included(given),
        ),
        str(given.get("model") or model),
        flag(given, "stream"),
        instructions if isinstance(instructions, str) else None,
        previous_id,
        listed(given, "tools"),
    )


def conversation_after(request: ResponsesRequest, said: Said) -> tuple[ChatMessage, ...]:
    """What was said up to the response and with it; instructions hold for one request alone."""
    messages = request.asked.messages[1 if request.instructions else 0 :]
    return (*messages, said.as_message)


def response(request: ResponsesRequest, said: Said) -> JsonObject:
    """The response as a whole."""
    return _finished(_head(request), list(_output(request.asked, said)), said)


def response_events(begun: JsonObject, finished: JsonObject) -> Iterator[JsonObject]:
    """The events of a stream that ends with the response `finished`."""
    numbers = count()

    def event(kind: str, **fields: Any) -> JsonObject:
        return {"type": kind, "sequence_number": next(numbers), **fields}

    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(finished["output"]):
        unfinished = {**item, "status": "in_progress"}
        for name in ("content", "summary"):
            if name in item:
                unfinished[name] = []
        if "arguments" in item:
            unfinished["arguments"] = ""
        yield event("response.output_item.added", output_index=index, item=unfinished)
        for kind, fields in _parts(item):
            yield event(kind, output_index=index, item_id=item["id"], **fields)
        yield event("response.output_item.done", output_index=index, item=item)
    ended = "completed" if finished["status"] == "completed" else "incomplete"
    yield event(f"response.{ended}", response=finished)


def begun_of(finished: JsonObject) -> JsonObject:
    """The response as it was before anything was said."""
    return {
        **finished,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }


def _with_plain_options(body: Any) -> Any:
    """The request without options that ask for nothing but what there is: text, and no summary."""
    if not isinstance(body, dict):
        return body
    plain = dict(body)
    if isinstance(plain.get("text"), dict):
        # How many words an answer has is a wish like `reasoning.effort`.
        plain["text"] = {k: v for k, v in plain["text"].items() if k != "verbosity" and v}
    if isinstance(plain.get("reasoning"), dict):
        wishes = ("effort", "summary", "generate_summary")
        plain["reasoning"] = {k: v for k, v in plain["reasoning"].items() if k not in wishes and v}
    return plain


def _included(given: JsonObject) -> list[Any]:
    included = listed(given, "include")
    unknown = [one for one in included if one not in _INCLUDED]
    if unknown:
        raise FieldError("include", f"expected some of {list(_INCLUDED)}, got {shown(unknown[0])}")
    return included


def _messages(given: Any) -> list[ChatMessage]:
    if isinstance(given, str):
        return [ChatMessage("user", given)]
    if given is None:
        return []
    if not isinstance(given, list):
        raise FieldError("input", f"expected a text or a list of items, got {shown(given)}")
    messages: list[ChatMessage] = []
    can_take_calls = False
    for number, item in enumerate(given):
        param = f"input.{number}"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":
            continue
        if kind == "function_call":
            call = _call(item, param)
            if can_take_calls:
                messages[-1] = replace(messages[-1], calls=(*messages[-1].calls, call))
            else:
                messages.append(ChatMessage("assistant", "", (call,)))
            can_take_calls = True
            continue
        messages.append(_message(kind, item, param))
        can_take_calls = messages[-1].role == "assistant"
    return messages


def _message(kind: Any, item: Any, param: str) -> ChatMessage:
    if kind == "function_call_output":
        return ChatMessage("tool", text_of(item.get("output"), f"{param}.output"))
    if kind != "message":
        raise FieldError(
            param,
            "expected a message, function_call, function_call_output or reasoning, got "
            f"{shown(kind or item)}",
            "unsupported_content",
        )
    role = role_of(item, _ROLES, param)
    return ChatMessage(role, text_of(item.get("content"), f"{param}.content"))


def _call(item: JsonObject, param: str) -> FunctionCall:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise FieldError(param, f"expected name and arguments as JSON, got {shown(item)}")
    return FunctionCall(name, arguments)


def _tool(tool: Any, param: str) -> ToolSpec:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise FieldError(param, f"expected a tool of type 'function', got {shown(tool)}")
    return tool_of(tool, param)


def _output(asked: Asked, said: Said) -> Iterator[JsonObject]:
    if said.thought:
        summary = [{"type": "summary_text", "text": said.thought}]
        yield {"type": "reasoning", "id": _id("rs"), "status": "completed", "summary": summary}
    if said.content or not said.calls:
        logprobs = [
            {
                "token": token.text,
                "logprob": token.logprob,
                "bytes": list(token.text.encode()),
                "top_logprobs": [],
            }
            for token in said.tokens
        ]
        text = {"type": "output_text", "text": said.content, "annotations": []}
        yield {
            "type": "message",
            "id": _id("msg"),
            "role": "assistant",
            "status": "incomplete" if said.finish_reason == "length" else "completed",
            "content": [{**text, "logprobs": logprobs}],
        }
    for call, call_id in zip(said.calls, call_ids(asked, said), strict=True):
        yield {
            "type": "function_call",
            "id": _id("fc"),
            "call_id": call_id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }


def _parts(item: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """The events between the beginning of an item and its end."""
    match item:
        case {"type": "message", "content": content}:
            for number, part in enumerate(content):
                place = {"content_index": number}
                empty = {**part, "text": "", "logprobs": []}
                yield "response.content_part.added", {**place, "part": empty}
                told = {**place, "logprobs": part["logprobs"]}
                yield "response.output_text.delta", {**told, "delta": part["text"]}
                yield "response.output_text.done", {**told, "text": part["text"]}
                yield "response.content_part.done", {**place, "part": part}
        case {"type": "function_call", "arguments": arguments, "name": name}:
            yield "response.function_call_arguments.delta", {"delta": arguments}
            yield "response.function_call_arguments.done", {"arguments": arguments, "name": name}


def _head(request: ResponsesRequest) -> JsonObject:
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "instructions": request.instructions,
        "max_output_tokens": request.asked.max_tokens,
        "metadata": {},
        "model": request.model,
        "parallel_tool_calls": not request.asked.is_one_call,
        "previous_response_id": request.previous_id,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": request.tools,
        "truncation": "disabled",
    }


def _finished(head: JsonObject, output: Sequence[JsonObject], said: Said) -> JsonObject:
    ran_out = said.finish_reason == "length"
    return {
        **head,
        "status": "incomplete" if ran_out else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if ran_out else None,
        "output": list(output),
        "usage": {
            "input_tokens": said.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": said.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": said.num_prompt_tokens + said.num_tokens,
        },
    }


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
