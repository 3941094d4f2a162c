"""Checks of the fields of a request; an invalid field is refused by name.

supported    read and applied
decided      settings of sampling, which are accepted and ignored: the run decides
harmless     accepted; no effect on the completion
empty only   features that the endpoint lacks; clients send these fields with empty values
others       refused, so that nothing an agent requests is silently ignored
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ludus.trainer.models.chat import ToolSpec
from ludus.trainer.rollout.agents.endpoint.exchange import (
    ApiError,
    ChatMessage,
    FieldError,
    FunctionCall,
    PolicyRequest,
    PolicyResponse,
    Role,
)

JsonObject = dict[str, Any]

DECIDED = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    }
)
HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"),
        *("prompt_cache_key", "prompt_cache_retention", "reasoning_effort"),
    }
)
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles of the chat template, by their names in a request."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_MAX_STOPS = 4
_MAX_COMPLETIONS = 16
_MAX_QUOTED_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request, and the settings of its response."""

    content: PolicyRequest
    model: str
    is_stream: bool
    fields: JsonObject
    """Checked fields of the body that are not null."""


def check_fields(
    body: Any, supported: Collection[str], empty_only: Mapping[str, Collection[Any]]
) -> JsonObject:
    """Return the fields of a request body that are not null.

    Args:
        empty_only: values that count as empty, for each field whose feature does not exist here.

    Raises:
        ApiError: the body is no object, or has a field that is not supported.
    """
    if not isinstance(body, dict):
        raise ApiError(f"expected a JSON object, got {quote(body)}")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name in supported or name in DECIDED or name in HARMLESS:
            continue
        if name not in empty_only:
            raise unknown_field_error(name)
        if value not in empty_only[name]:
            raise FieldError(
                name,
                f"this endpoint does not support the value {quote(value)}; remove the field",
                "unsupported_parameter",
            )
    if read_integer(fields, "top_logprobs", 0):
        raise FieldError(
            "top_logprobs",
            "expected 0, because only the sampled tokens have log-probs",
            "unsupported_parameter",
        )
    return fields


def make_request(
    fields: JsonObject,
    default_model: str,
    messages: Iterable[ChatMessage],
    *,
    max_tokens: int | None,
    with_logprobs: bool,
) -> ApiRequest:
    """Return the request with these messages and the fields that both formats share."""
    choice = fields.get("tool_choice")
    tools = tuple(
        _read_tool(tool, f"tools.{n}") for n, tool in enumerate(read_list(fields, "tools"))
    )
    content = PolicyRequest(
        messages=tuple(messages),
        tools=_choose_tools(tuple(tools), choice),
        num=read_integer(fields, "n", 1, _MAX_COMPLETIONS) or 1,
        stop=_read_stops(fields),
        max_tokens=max_tokens,
        seed=read_integer(fields, "seed", -(2**63), 2**63),
        max_one_call=not read_flag(fields, "parallel_tool_calls", default=True),
        requires_call=choice == "required" or isinstance(choice, dict),
        with_logprobs=with_logprobs,
    )
    model = str(fields.get("model") or default_model)
    return ApiRequest(content, model, read_flag(fields, "stream"), fields)


def unknown_field_error(name: str) -> FieldError:
    return FieldError(
        name, "this endpoint does not support the field; remove it", "unknown_parameter"
    )


def quote(value: Any) -> str:
    """Return a value in the form in which messages quote it."""
    return f"{value!r:.{_MAX_QUOTED_CHARACTERS}}"


def read_integer(
    body: JsonObject, name: str, minimum: int, maximum: int | None = None
) -> int | None:
    """Return the integer in a field; None if the field is missing."""
    value = body.get(name)
    if value is None:
        return None
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < minimum or (maximum is not None and value > maximum):
        bounds = f"of {minimum} or more" if maximum is None else f"from {minimum} to {maximum}"
        raise FieldError(name, f"expected a whole number {bounds}, got {quote(value)}")
    return int(value)


def read_flag(body: JsonObject, name: str, *, default: bool = False) -> bool:
    """Return the flag in a field."""
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise FieldError(name, f"expected true or false, got {quote(value)}")
    return value


def read_list(body: JsonObject, name: str, param: str = "") -> list[Any]:
    """Return the list in a field; empty if the field is missing."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise FieldError(param or name, f"expected a list, got {quote(value)}")
    return value


def read_message(message: Any, param: str) -> ChatMessage:
    """Return a message without its calls."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise FieldError(f"{param}.role", f"expected one of {list(_ROLES)}, got {quote(role)}")
    return ChatMessage(_ROLES[role], read_text(message.get("content"), f"{param}.content"))


def read_call(call: Any, param: str) -> FunctionCall:
    """Return a call of a function, which chat completions nest in a field."""
    match call.get("function", call) if isinstance(call, dict) else None:
        case {"name": str(name), "arguments": str(arguments)}:
            return FunctionCall(name, arguments)
    raise FieldError(
        param, f"expected a function with name and arguments as JSON, got {quote(call)}"
    )


def read_text(content: Any, param: str) -> str:
    """Return the text of a message's content, which is a text or a list of text parts.

    Raises:
        FieldError: the content has another form; policies support no images or audio.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError(param, f"expected a text or a list of parts, got {quote(content)}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            continue
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise FieldError(
                f"{param}.{number}",
                f"expected a part of type 'text', because the policy reads only text; got "
                f"{quote(kind or part)}",
                "unsupported_content",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def token_logprobs(response: PolicyResponse) -> list[JsonObject]:
    """Return OpenAI's entries for the tokens of a response, with their log-probs."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in response.tokens
    ]


def _read_stops(fields: JsonObject) -> tuple[str, ...]:
    value = fields.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    is_valid = isinstance(stops, list) and len(stops) <= _MAX_STOPS
    if not is_valid or not all(isinstance(stop, str) and stop for stop in stops):
        raise FieldError("stop", f"expected up to {_MAX_STOPS} texts, got {quote(value)}")
    return tuple(stops)


def _read_tool(tool: Any, param: str) -> ToolSpec:
    """Return a tool in the form that chat templates list; chat completions nest its function."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise FieldError(param, f"expected a tool of type 'function', got {quote(tool)}")
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FieldError(f"{param}.name", f"expected a function with a name, got {quote(function)}")
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise FieldError(f"{param}.parameters", f"expected a JSON schema, got {quote(schema)}")
    description = str(function.get("description") or "")
    spec = {"name": function["name"], "description": description, "parameters": schema}
    return {"type": "function", "function": spec}


def _choose_tools(tools: tuple[ToolSpec, ...], choice: Any) -> tuple[ToolSpec, ...]:
    """Return the tools that a completion may call; the policy is not forced to call one."""
    match choice:
        case None | "auto" | "required":
            return tools
        case "none":
            return ()
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "function",
            "name": str(name),
        }:
            chosen_tools = tuple(tool for tool in tools if tool["function"]["name"] == name)
            if chosen_tools:
                return chosen_tools
            raise FieldError(
                "tool_choice", f"expected one of the request's tools, got {quote(name)}"
            )
    raise FieldError(
        "tool_choice", f"expected 'none', 'auto', 'required' or a function, got {quote(choice)}"
    )
