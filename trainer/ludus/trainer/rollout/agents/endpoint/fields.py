"""Checks of the fields of a request.

supported fields   applied
run settings       accepted and ignored, because the run chooses its sampling parameters
harmless fields    accepted and ignored, because they do not affect the completion
fields with an     accepted if empty, because clients send them although they do not use the feature
  empty value
other fields       refused, so that no request of an agent is silently ignored
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.env.incoming.json_values import check_num_values
from ludus.proto.errors import InvalidCallError
from ludus.trainer.models.tool_calls import ToolSpec
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

_IGNORED_FIELDS = (
    # The run chooses its sampling parameters.
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    # The other fields do not affect the completion.
    *("user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"),
    *("prompt_cache_key", "prompt_cache_retention", "reasoning_effort"),
)
_ROLE_BY_NAME: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles of the chat template, by the role's name in a request."""
_TEXT_PART_TYPES = ("text", "input_text", "output_text")
_MAX_STOP_TEXTS = 4
_MAX_COMPLETIONS = 16
_MAX_QUOTED_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request to the policy, and the settings of the HTTP response."""

    policy_request: PolicyRequest
    model: str
    is_streamed: bool
    fields: JsonObject
    """Checked fields of the body that are not null."""


def check_fields(
    body: Any, supported_fields: Collection[str], empty_values: Mapping[str, Collection[Any]]
) -> JsonObject:
    """Return the fields of a request body that are not null.

    Args:
        empty_values: accepted values of each field that is otherwise not supported.

    Raises:
        ApiError: the body is not an object, or has an invalid or unsupported field.
    """
    if not isinstance(body, dict):
        raise ApiError(f"expected a JSON object, got {quote(body)}")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name in supported_fields or name in _IGNORED_FIELDS:
            continue
        if name not in empty_values:
            raise make_unknown_field_error(name)
        if value not in empty_values[name]:
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
    needs_logprobs: bool,
) -> ApiRequest:
    """Return a request with these messages and with the fields that both API formats share."""
    tool_choice = fields.get("tool_choice")
    tools = tuple(
        _read_tool(tool, f"tools.{index}") for index, tool in enumerate(read_list(fields, "tools"))
    )
    messages = tuple(messages)
    _check_call_arguments(messages)
    policy_request = PolicyRequest(
        messages=messages,
        tools=_choose_tools(tools, tool_choice),
        num_completions=read_integer(fields, "n", 1, _MAX_COMPLETIONS) or 1,
        stop_texts=_read_stop_texts(fields),
        max_tokens=max_tokens,
        seed=read_integer(fields, "seed", -(2**63), 2**63),
        is_limited_to_one_call=not read_flag(fields, "parallel_tool_calls", default=True),
        requires_call=tool_choice == "required" or isinstance(tool_choice, dict),
        needs_logprobs=needs_logprobs,
    )
    model = str(fields.get("model") or default_model)
    return ApiRequest(policy_request, model, read_flag(fields, "stream"), fields)


def _check_call_arguments(messages: Sequence[ChatMessage]) -> None:
    """Refuse calls in the history whose arguments, which are JSON in strings, cost seconds."""
    try:
        check_num_values(*(call.arguments for message in messages for call in message.calls))
    except InvalidCallError as error:
        raise FieldError("messages", f"arguments of tool calls: {error.message}") from None


def make_unknown_field_error(name: str) -> FieldError:
    return FieldError(
        name, "this endpoint does not support the field; remove it", "unknown_parameter"
    )


def quote(value: Any) -> str:
    """Return a value as quoted, shortened text for error messages."""
    if isinstance(value, str):
        value = value[:_MAX_QUOTED_CHARACTERS]
    return f"{value!r:.{_MAX_QUOTED_CHARACTERS}}"


def read_integer(
    body: JsonObject, name: str, min_value: int, max_value: int | None = None
) -> int | None:
    """Return the integer in a field; None if the field is missing."""
    number = body.get(name)
    if number is None:
        return None
    is_integer = isinstance(number, int) and not isinstance(number, bool)
    if not is_integer or number < min_value or (max_value is not None and number > max_value):
        bounds = (
            f"of {min_value} or more" if max_value is None else f"from {min_value} to {max_value}"
        )
        raise FieldError(name, f"expected a whole number {bounds}, got {quote(number)}")
    return int(number)


def read_flag(body: JsonObject, name: str, *, default: bool = False) -> bool:
    """Return the boolean in a field; `default` if the field is missing."""
    flag = body.get(name, default)
    if not isinstance(flag, bool):
        raise FieldError(name, f"expected true or false, got {quote(flag)}")
    return flag


def read_list(body: JsonObject, name: str, param: str = "") -> list[Any]:
    """Return the list in a field; empty if the field is missing."""
    entries = body.get(name)
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise FieldError(param or name, f"expected a list, got {quote(entries)}")
    return entries


def read_message(message: Any, param: str) -> ChatMessage:
    """Return a message without its calls."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLE_BY_NAME:
        raise FieldError(
            f"{param}.role", f"expected one of {list(_ROLE_BY_NAME)}, got {quote(role)}"
        )
    return ChatMessage(_ROLE_BY_NAME[role], read_text(message.get("content"), f"{param}.content"))


def read_call(call: Any, param: str) -> FunctionCall:
    """Return a function call. In chat completions it is nested in the field `function`."""
    match call.get("function", call) if isinstance(call, dict) else None:
        case {"name": str(name), "arguments": str(arguments)}:
            return FunctionCall(name, arguments)
    raise FieldError(
        param, f"expected a function with name and arguments as JSON, got {quote(call)}"
    )


def read_text(content: Any, param: str) -> str:
    """Return the text of a message's content, which is a string or a list of text parts.

    Raises:
        FieldError: the content has another form, for example images.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError(param, f"expected a text or a list of parts, got {quote(content)}")
    texts = []
    for part_index, part in enumerate(content):
        part_type = part.get("type") if isinstance(part, dict) else None
        if part_type == "refusal":
            continue
        if part_type not in _TEXT_PART_TYPES or not isinstance(part.get("text"), str):
            raise FieldError(
                f"{param}.{part_index}",
                f"expected a part of type 'text', because the policy reads only text; got "
                f"{quote(part_type or part)}",
                "unsupported_content",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def make_token_logprobs(response: PolicyResponse) -> list[JsonObject]:
    """Return the tokens of a response and their log-probs in OpenAI's format."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in response.tokens
    ]


def _read_stop_texts(fields: JsonObject) -> tuple[str, ...]:
    stop = fields.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    is_valid = isinstance(texts, list) and len(texts) <= _MAX_STOP_TEXTS
    if not is_valid or not all(isinstance(text, str) and text for text in texts):
        raise FieldError("stop", f"expected up to {_MAX_STOP_TEXTS} texts, got {quote(stop)}")
    return tuple(texts)


def _read_tool(tool: Any, param: str) -> ToolSpec:
    """Return a tool in the form that chat templates use.

    In chat completions the function is nested in the field `function`.
    """
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


def _choose_tools(tools: tuple[ToolSpec, ...], tool_choice: Any) -> tuple[ToolSpec, ...]:
    """Return the tools that a completion may call. The policy is not forced to call any."""
    match tool_choice:
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
        "tool_choice",
        f"expected 'none', 'auto', 'required' or a function, got {quote(tool_choice)}",
    )
