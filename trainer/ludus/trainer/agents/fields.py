"""Fields of a request, read one by one; what is not as it should be is refused by name.

honoured     read, and done
decided      a wish about sampling: taken, and decided by the run (docs/agents.md)
harmless     taken, and of no effect on what is sampled
only empty   what the endpoint does not do; clients send it empty
the rest     refused: nothing that an agent asks for is silently left out
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ludus.trainer.agents.api_error import ApiError, FieldError
from ludus.trainer.models.template import ToolSpec

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
_MAX_ANSWERS = 16
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Known:
    """The fields of one of OpenAI's forms."""

    honoured: frozenset[str]
    only_empty: Mapping[str, Collection[Any]]
    """What means nothing in a field that the endpoint does not do, beside null."""

    def check(self, body: Any) -> JsonObject:
        """The request without fields that are null.

        Raises:
            ApiError: it is no object, or has a field that is not honoured.
        """
        if not isinstance(body, dict):
            raise ApiError(f"expected a JSON object, got {shown(body)}")
        given = {name: value for name, value in body.items() if value is not None}
        for name, value in given.items():
            if name in self.honoured or name in DECIDED or name in HARMLESS:
                continue
            if name not in self.only_empty:
                raise FieldError(
                    name, "this endpoint does not know the field; leave it out", "unknown_parameter"
                )
            if value not in self.only_empty[name]:
                raise FieldError(
                    name,
                    f"this endpoint does not do that, got {shown(value)}; leave it out",
                    "unsupported_parameter",
                )
        return given


def shown(value: Any) -> str:
    """A value as messages show it."""
    return f"{value!r:.{_SHOWN_CHARACTERS}}"


def whole(body: JsonObject, name: str, least: int, most: int | None = None) -> int | None:
    """The whole number in a field; None where it is left out."""
    value = body.get(name)
    if value is None:
        return None
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise FieldError(name, f"expected a whole number {bounds}, got {shown(value)}")
    return int(value)


def flag(body: JsonObject, name: str, *, default: bool = False) -> bool:
    """The flag in a field."""
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise FieldError(name, f"expected true or false, got {shown(value)}")
    return value


def listed(body: JsonObject, name: str, param: str = "") -> list[Any]:
    """The list in a field; empty where it is left out."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise FieldError(param or name, f"expected a list, got {shown(value)}")
    return value


def role_of(message: Any, roles: Mapping[str, _RoleT], param: str) -> _RoleT:
    """The role of a message, as chat templates call it."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in roles:
        raise FieldError(f"{param}.role", f"expected one of {list(roles)}, got {shown(role)}")
    return roles[role]


def num_answers(body: JsonObject) -> int:
    """How many answers are wanted."""
    return whole(body, "n", 1, _MAX_ANSWERS) or 1


def stops(body: JsonObject) -> tuple[str, ...]:
    """The texts to stop at."""
    value = body.get("stop", [])
    listed = [value] if isinstance(value, str) else value
    is_sound = isinstance(listed, list) and len(listed) <= _MAX_STOPS
    if not is_sound or not all(isinstance(one, str) and one for one in listed):
        raise FieldError("stop", f"expected up to {_MAX_STOPS} texts, got {shown(value)}")
    return tuple(listed)


def text_of(content: Any, param: str) -> str:
    """The words of a message's content: a text, or a list of parts that are texts.

    Raises:
        FieldError: it holds something else: no policy here sees pictures or hears sound.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError(param, f"expected a text or a list of parts, got {shown(content)}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            continue
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise FieldError(
                f"{param}.{number}",
                "expected a part of type 'text': the policy reads text alone; got "
                f"{shown(kind or part)}",
                "unsupported_content",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def tool_of(function: Any, param: str) -> ToolSpec:
    """A function as chat templates list it.

    Raises:
        FieldError: it has no name, or parameters that are no JSON schema.
    """
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FieldError(f"{param}.name", f"expected a function with a name, got {shown(function)}")
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise FieldError(f"{param}.parameters", f"expected a JSON schema, got {shown(schema)}")
    described = str(function.get("description") or "")
    spec = {"name": function["name"], "description": described, "parameters": schema}
    return {"type": "function", "function": spec}


def must_call(choice: Any) -> bool:
    """Whether a tool choice wants a call."""
    return choice == "required" or isinstance(choice, dict)


def offered(tools: tuple[ToolSpec, ...], choice: Any) -> tuple[ToolSpec, ...]:
    """The tools that an answer may call.

    "required" offers all, and a named function that one alone: nothing forces a policy to call.

    Raises:
        FieldError: the choice is none of OpenAI's, or names no tool.
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
                f"expected 'none', 'auto', 'required' or a function, got {shown(choice)}",
            )
    chosen = tuple(tool for tool in tools if tool["function"]["name"] == name)
    if not chosen:
        raise FieldError("tool_choice", f"expected one of the request's tools, got {shown(name)}")
    return chosen
