"""Checks of the fields of a request; an invalid field is refused by name.

supported    read and applied
decided      settings of sampling, which are accepted and ignored: the run decides
harmless     accepted; no effect on the completion
empty only   features that the endpoint lacks; clients send these fields with empty values
others       refused, so that nothing an agent requests is silently ignored
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ludus.trainer.models.template import ToolSpec
from ludus.trainer.rollout.agents.endpoint.api_error import ApiError, FieldError

JsonObject = dict[str, Any]
_RoleT = TypeVar("_RoleT", bound=str)

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
_TEXT_PARTS = ("text", "input_text", "output_text")
_MAX_STOPS = 4
_MAX_COMPLETIONS = 16
_MAX_QUOTED_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class FieldRules:
    """The fields of one of OpenAI's request formats."""

    supported: frozenset[str]
    empty_only: Mapping[str, Collection[Any]]
    """Values, in addition to null, that count as empty in a field without a feature."""

    def check(self, body: Any) -> JsonObject:
        """Return the request without fields that are null.

        Raises:
            ApiError: the body is no object, or has a field that is not supported.
        """
        if not isinstance(body, dict):
            raise ApiError(f"expected a JSON object, got {quote(body)}")
        fields = {name: value for name, value in body.items() if value is not None}
        for name, value in fields.items():
            if name in self.supported or name in DECIDED or name in HARMLESS:
                continue
            if name not in self.empty_only:
                raise FieldError(
                    name, "this endpoint does not support the field; remove it", "unknown_parameter"
                )
            if value not in self.empty_only[name]:
                raise FieldError(
                    name,
                    f"this endpoint does not support the value {quote(value)}; remove the field",
                    "unsupported_parameter",
                )
        refuse_top_logprobs(fields)
        return fields


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


def read_role(message: Any, roles: Mapping[str, _RoleT], param: str) -> _RoleT:
    """Return the chat template's name of a message's role."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in roles:
        raise FieldError(f"{param}.role", f"expected one of {list(roles)}, got {quote(role)}")
    return roles[role]


def read_num_completions(body: JsonObject) -> int:
    """Return the requested number of completions."""
    return read_integer(body, "n", 1, _MAX_COMPLETIONS) or 1


def read_stops(body: JsonObject) -> tuple[str, ...]:
    """Return the texts before which a completion is cut."""
    value = body.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    is_valid = isinstance(stops, list) and len(stops) <= _MAX_STOPS
    if not is_valid or not all(isinstance(stop, str) and stop for stop in stops):
        raise FieldError("stop", f"expected up to {_MAX_STOPS} texts, got {quote(value)}")
    return tuple(stops)


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


def read_tool(function: Any, param: str) -> ToolSpec:
    """Return a function in the form that chat templates list.

    Raises:
        FieldError: it has no name, or its parameters are no JSON schema.
    """
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FieldError(f"{param}.name", f"expected a function with a name, got {quote(function)}")
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise FieldError(f"{param}.parameters", f"expected a JSON schema, got {quote(schema)}")
    description = str(function.get("description") or "")
    spec = {"name": function["name"], "description": description, "parameters": schema}
    return {"type": "function", "function": spec}


def requires_call(choice: Any) -> bool:
    """Return whether a tool choice requires a call."""
    return choice == "required" or isinstance(choice, dict)


def choose_tools(tools: tuple[ToolSpec, ...], choice: Any) -> tuple[ToolSpec, ...]:
    """Return the tools that a completion may call.

    "required" selects all tools, and a function only that one. The policy is not forced to call.

    Raises:
        FieldError: the choice is unknown, or names no tool.
    """
    match choice:
        case None | "auto" | "required":
            return tools
        case "none":
            return ()
        case {"type": "function", "function": {"name": str(name)}}:
            pass
        case {"type": "function", "name": str(name)}:
            pass
        case _:
            raise FieldError(
                "tool_choice",
                f"expected 'none', 'auto', 'required' or a function, got {quote(choice)}",
            )
    chosen_tools = tuple(tool for tool in tools if tool["function"]["name"] == name)
    if not chosen_tools:
        raise FieldError("tool_choice", f"expected one of the request's tools, got {quote(name)}")
    return chosen_tools


def refuse_top_logprobs(body: JsonObject) -> None:
    """Refuse log-probs of tokens that were not sampled.

    Raises:
        FieldError: the request asks for some.
    """
    if read_integer(body, "top_logprobs", 0):
        raise FieldError(
            "top_logprobs",
            "expected 0, because only the sampled tokens have log-probs",
            "unsupported_parameter",
        )


def token_logprobs(response_tokens: Collection[Any]) -> list[JsonObject]:
    """Return OpenAI's entries for the tokens of a response, with their log-probs."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in response_tokens
    ]
